"""An interpreted kernel that reads or writes past its tensors is detected."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _copy(source, target, total, LOADED: tl.constexpr, STORED: tl.constexpr, ADDED: tl.constexpr):
    element = tl.arange(0, 16)
    loaded = tl.load(source + element, mask=element < LOADED, other=0)
    tl.store(target + element, loaded, mask=element < STORED)
    tl.atomic_add(total + element, loaded, mask=element < ADDED)


@pytest.mark.parametrize("reached", [(10, 10, 1), (11, 10, 1), (10, 11, 1), (10, 10, 2)])
def test_what_lies_past_a_tensor(reached: tuple[int, int, int]) -> None:
    """The memory past a tensor exists, inside a larger one, so that nothing else would fail."""
    source, target, total = torch.arange(64)[16:26], torch.zeros(64).long()[16:26], torch.zeros(64).long()[16:17]
    if reached == (10, 10, 1):
        _copy[(1,)](source, target, total, *reached)
        assert torch.equal(target, source)
    else:
        with pytest.raises(InterpreterError, match=r"1 of \d+ addresses are in no tensor"):
            _copy[(1,)](source, target, total, *reached)
