"""Dispatch to GPU kernels: a decorator on a plain-torch function names the kernel that replaces it on a GPU.

The function and its kernel have the same signature.
"""

from collections.abc import Callable
from functools import cached_property, update_wrapper
from importlib import import_module
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import torch

First = TypeVar("First")
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


class WithKernel(Generic[First, Rest, Result]):
    """A plain-torch function, `reference`, and a kernel with the same signature that replaces it on a GPU."""

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
        """The kernel's function, imported at its first use, because Triton imports slowly and exists only on Linux."""
        module, name = self._place.split(":")
        return cast(Callable[Concatenate[First, Rest], Result], getattr(import_module(module), name))

    def __call__(self, first: First, /, *rest: Rest.args, **named: Rest.kwargs) -> Result:
        """Run the kernel if the first argument is on a GPU and the kernel supports the arguments; else the reference.

        If `on_gpu` got a function `tensor`, the device of the tensor that this function returns decides.
        """
        tensor: Any = first if self._tensor is None else self._tensor(first)
        if not tensor.is_cuda or not (self._fits is None or self._fits(first, *rest, **named)):
            return self.reference(first, *rest, **named)
        with torch.cuda.device_of(tensor):  # Triton launches on the current device, which may differ
            return self.kernel(first, *rest, **named)


def on_gpu(
    place: str, tensor: Callable[[Any], torch.Tensor] | None = None, fits: Callable[..., bool] | None = None
) -> Callable[[Callable[Concatenate[First, Rest], Result]], WithKernel[First, Rest, Result]]:
    """Decorate a plain-torch function with the kernel that replaces it on a GPU.

    Args:
        place: the kernel as `module:name`, a function or class that is called with the same arguments.
        tensor: returns, from the first argument, the tensor whose device decides. None: the first argument itself.
        fits: returns whether the kernel supports the arguments. None: it supports all.
    """

    def decorate(reference: Callable[Concatenate[First, Rest], Result]) -> WithKernel[First, Rest, Result]:
        return WithKernel(reference, place, tensor, fits)

    return decorate
