"""Shapes of values in Triton's interpreter, made once each, because making them takes most of a kernel's time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """The attributes that types and tensors of a shape have in common; immutable."""

    of_type: Any  # a tuple of numbers
    numel: int
    name: str
    of_tensor: Any  # a tuple of constants
    constant_numel: Any

    @classmethod
    def make(cls, sizes: Sizes) -> "Shape":
        """Make a shape as `block_type` and `tensor` do, with the same errors."""
        of_type = tl.tuple(sizes)
        numel = validate_block_shape(of_type)
        return cls(of_type, numel, str(of_type), tl.tuple([tl.constexpr(one) for one in sizes]), tl.constexpr(numel))


@contextmanager
def shapes_made_once() -> Iterator[None]:
    """Within the context, types and tensors look up their shapes, and operands of equal shape are not broadcast."""
    shapes: dict[Sizes, Shape] = {}
    of_scalars = tl.tuple([]), tl.constexpr(1)
    block_type, tensor, broadcast = tl.block_type, tl.tensor, TritonSemantic.broadcast_impl_value

    def type_of_block(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        sizes = tuple([one.value if isinstance(one, tl.constexpr) else one for one in shape])
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        if sizes not in shapes:
            shapes[sizes] = Shape.make(sizes)
        found = shapes[sizes]
        self.element_ty, self.shape, self.numel = element_ty, found.of_type, found.numel
        self.name = f"<{found.name}, {element_ty}>"

    def value(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.is_block():
            found = shapes.get(tuple(type.shape.values)) or Shape.make(tuple(type.shape.values))
            self.shape, self.numel = found.of_tensor, found.constant_numel
        else:
            self.shape, self.numel = of_scalars

    def broadcast_unequal(self: Any, left: Any, right: Any) -> Any:
        blocks = left.type.is_block(), right.type.is_block()
        if not any(blocks) or (all(blocks) and left.type.shape.values == right.type.shape.values):
            return left, right
        return broadcast(self, left, right)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_type, "__init__", type_of_block)
        patch.setattr(tensor, "__init__", value)
        patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_unequal)
        yield
