"""Which row each slot of some runs is, in Triton: what `expand_runs` tells, without a row for those past the last."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common.launch import dependent_launch
from sparsekv.kernels.common.tiles_triton import wait_for_previous_kernel

SLOTS = 256  # whose rows are found together


@triton.jit(do_not_specialize=["capacity"])
def _rows_kernel(
    starts, ends, rows, runs, starts_stride, ends_stride, rows_stride, capacity,
    STEPS: tl.constexpr, SLOTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The rows that some slots are: the run of each is found by a search that asks for three ends at a time."""
    wait_for_previous_kernel(EARLY)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    starts, ends = starts + head * starts_stride, ends + head * ends_stride
    last = tl.minimum(tl.load(ends + runs - 1), capacity)
    # The capacity may be far more than there is.
    if tl.program_id(0) * SLOTS < last:
        run = tl.zeros_like(slot)
        for step in tl.static_range(STEPS):
            width = 1 << (2 * (STEPS - 1 - step))
            passed = tl.zeros_like(slot)
            for part in tl.static_range(1, 4):
                probe = run + part * width
                end = tl.load(ends + probe - 1, mask=probe <= runs, other=2147483647)
                passed += (end <= slot).to(tl.int32)
            run += passed * width
        run = tl.minimum(run, runs - 1)
        before = tl.load(ends + run - 1, mask=run > 0, other=0)
        row = tl.load(starts + run).to(tl.int32) + slot - before
        tl.store(rows + head * rows_stride + slot, row, mask=slot < last)


def list_rows(starts: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor, capacity: int) -> None:
    """Write the rows of runs, starts and ends [H, R], one after the other, to `rows` [H, capacity or more] int32.

    What comes after the last one is left as it is.
    """
    H, R = ends.shape
    _rows_kernel[(triton.cdiv(capacity, SLOTS), H)](
        starts, ends, rows, R, starts.stride(0), ends.stride(0), rows.stride(0), capacity,
        STEPS=(R.bit_length() + 1) // 2, SLOTS=SLOTS, num_warps=4, **dependent_launch(starts.device),
    )  # fmt: skip
