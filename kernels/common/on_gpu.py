"""One signature a kernel: the definition in plain torch is decorated with the name of the kernel that replaces it."""

from collections.abc import Callable
from functools import cached_property, update_wrapper
from importlib import import_module
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import torch

First = TypeVar("First")
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


class WithKernel(Generic[First, Rest, Result]):
    """A function in plain torch, `reference`, and the kernel of the same signature that runs instead on a GPU."""

    def __init__(
        self,
        reference: Callable[Concatenate[First, Rest], Result],
        place: str,
        tensor: Callable[[First], torch.Tensor] | None,
        fits: Callable[Concatenate[First, Rest], bool] | None,
    ) -> None:
        update_wrapper(self, reference)
        self.reference, self._place, self._tensor, self._fits = reference, place, tensor, fits

    @cached_property
    def kernel(self) -> Callable[Concatenate[First, Rest], Result]:
        """The GPU's function, imported at its first use: Triton takes long to import, and exists on Linux only."""
        module, name = self._place.split(":")
        return cast(Callable[Concatenate[First, Rest], Result], getattr(import_module(module), name))

    def __call__(self, first: First, /, *rest: Rest.args, **named: Rest.kwargs) -> Result:
        """Run the kernel where the first argument is stored on a GPU and the arguments fit, else the reference."""
        tensor: Any = first if self._tensor is None else self._tensor(first)
        if not tensor.is_cuda or not (self._fits is None or self._fits(first, *rest, **named)):
            return self.reference(first, *rest, **named)
        with torch.cuda.device_of(tensor):  # Triton launches on the current device, which may be another
            return self.kernel(first, *rest, **named)


def on_gpu(
    place: str, tensor: Callable[[Any], torch.Tensor] | None = None, fits: Callable[..., bool] | None = None
) -> Callable[[Callable[Concatenate[First, Rest], Result]], WithKernel[First, Rest, Result]]:
    """Decorate a definition in plain torch with the kernel that replaces it on a GPU.

    Args:
        place: `module:function`, which takes the same arguments, or a class that is made of them.
        tensor: gives the tensor that decides, from the first argument. None: the first argument is that tensor.
        fits: whether the kernel takes these arguments. None: all.
    """

    def decorate(reference: Callable[Concatenate[First, Rest], Result]) -> WithKernel[First, Rest, Result]:
        return WithKernel(reference, place, tensor, fits)

    return decorate
