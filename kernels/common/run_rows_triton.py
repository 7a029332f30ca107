"""Row indices of runs, in Triton: `expand_runs`, except that slots past the last row are left unwritten."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common.launch import dependent_launch
from sparsekv.kernels.common.tiles_triton import wait_for_previous_kernel

SLOTS = 256  # of one program


@triton.jit(do_not_specialize=["capacity"])
def _rows_kernel(
    starts, ends, rows, runs, starts_stride, ends_stride, rows_stride, capacity,
    STEPS: tl.constexpr, SLOTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Row indices of a program's slots; the run of each slot is found by a search that reads three ends at a step."""
    wait_for_previous_kernel(EARLY)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    starts, ends = starts + head * starts_stride, ends + head * ends_stride
    last = tl.minimum(tl.load(ends + runs - 1), capacity)
    # The capacity may be far above the number of rows.
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
    """Write the row indices of runs, starts and ends [H, R], run after run to `rows` [H, capacity or more] int32.

    Slots after the last row are left unwritten.
    """
    H, R = ends.shape
    _rows_kernel[(triton.cdiv(capacity, SLOTS), H)](
        starts, ends, rows, R, starts.stride(0), ends.stride(0), rows.stride(0), capacity,
        STEPS=(R.bit_length() + 1) // 2, SLOTS=SLOTS, num_warps=4, **dependent_launch(starts.device),
    )  # fmt: skip
