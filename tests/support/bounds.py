"""A check that kernels in Triton's interpreter access only the tensors that they get, like memcheck on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first element, and the address after its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def assert_within(extents: np.ndarray, pointers: Any, mask: Any) -> None:
    """Raise IndexError unless each pointer that the mask enables is to an element within one of the extents [N, 2]."""
    addresses, wanted = np.broadcast_arrays(pointers.data.astype(np.int64), mask.data.astype(bool))
    some, size = addresses[wanted], max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
    if not len(some) or ((some.min() >= extents[:, 0]) & (some.max() + size <= extents[:, 1])).any():
        return
    within = ((some[:, None] >= extents[:, 0]) & (some[:, None] + size <= extents[:, 1])).any(1)
    if not within.all():
        raise IndexError(f"{int((~within).sum())} of {len(some)} addresses are in no tensor that the kernel was given")


@contextmanager
def kernels_within_bounds() -> Iterator[None]:
    """Within the context, make launched kernels raise IndexError if they read or write outside of their arguments."""
    extents = np.empty((0, 2), np.int64)
    given, masked_load, masked_store, atomic = (
        GridExecutor._init_args_hst,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
        InterpreterBuilder.create_atomic_rmw,
    )

    def note(self: Any, arguments: Any, named: Any) -> Any:
        nonlocal extents
        found = given(self, arguments, named)
        tensors = [one for one in (*found[0], *found[1].values()) if isinstance(one, torch.Tensor) and one.numel()]
        extents = np.array([extent(one) for one in tensors], np.int64).reshape(-1, 2)
        return found

    def load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        assert_within(extents, pointers, mask)
        return masked_load(self, pointers, mask, *others)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        assert_within(extents, pointers, mask)
        return masked_store(self, pointers, value, mask, *others)

    def add(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        assert_within(extents, pointers, mask)
        return atomic(self, operation, pointers, value, mask, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "_init_args_hst", note)
        patch.setattr(InterpreterBuilder, "create_masked_load", load)
        patch.setattr(InterpreterBuilder, "create_masked_store", store)
        patch.setattr(InterpreterBuilder, "create_atomic_rmw", add)
        yield
