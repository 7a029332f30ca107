"""New rows of several sequences in their places, by a kernel and in plain torch."""

from collections.abc import Callable

import pytest
import torch
from support.kernel_runs import DEVICE, compiled_or_interpreted
from support.pairs import every_pair
from support.random_tensors import normal

from sparsekv.kernels.common.row_operations import store_in_slots, store_new_row
from sparsekv.kernels.common.run_rows_triton import store_in_slots_triton, store_new_row_triton

pytestmark = compiled_or_interpreted
S, ROOM = 5, 9


@pytest.mark.parametrize("store", [store_in_slots_triton, store_in_slots.reference], ids=["kernel", "torch"])
@every_pair(
    {
        "dtype": [torch.float32, torch.float16, torch.bfloat16],
        "D": [64, 96, 128, 256],
        "strides": ["heads first", "tokens first", "channels apart"],
    }
)
def test_each_row_is_in_its_place_and_no_other_is_touched(
    store: Callable[..., None], dtype: torch.dtype, D: int, strides: str
) -> None:
    before = [normal(seed, S, 2, ROOM, D).to(dtype).to(DEVICE) for seed in (0, 1)]
    new = [normal(seed, 2, 4, D).to(dtype).to(DEVICE) for seed in (2, 3)]
    if strides == "tokens first":
        new = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in new]
    if strides == "channels apart":
        new = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in new]
    new[1] = new[1] if strides == "heads first" else new[1].contiguous()  # strides are each one's own
    slots, rows = torch.tensor([[4, 0, 4, 1], [0, ROOM - 1, 3, -1]], device=DEVICE)
    after = [one.clone() for one in before]
    store(tuple(after), tuple(new), slots, rows)
    for was, now, given in zip(before, after, new, strict=True):
        was[4, :, 0], was[0, :, ROOM - 1], was[4, :, 3] = given[:, 0], given[:, 1], given[:, 2]
        assert torch.equal(now, was)


@pytest.mark.parametrize("store", [store_new_row_triton, store_new_row.reference], ids=["kernel", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [64, 96])
@pytest.mark.parametrize("row", [0, 1, ROOM - 1])
@pytest.mark.parametrize("earlier", [0, 3])
def test_a_new_row_is_in_its_place_in_each_head(
    store: Callable[..., None], dtype: torch.dtype, D: int, row: int, earlier: int
) -> None:
    """Also where the rows of earlier tokens are in the same buffer, as in the layers of a batch whose windows slide."""
    before = [normal(seed, S, ROOM, D).to(dtype).to(DEVICE) for seed in (0, 1)]
    new = [normal(seed, 1, S, D).to(dtype).to(DEVICE).transpose(0, 1) for seed in (2, 3)]
    after = [torch.cat([one[:, :earlier], one], 1)[:, earlier:] for one in before]
    store(tuple(after), tuple(new), torch.tensor([row], device=DEVICE))
    for was, now, given in zip(before, after, new, strict=True):
        was[:, row] = given[:, 0]
        assert torch.equal(now, was)
