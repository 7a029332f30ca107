"""`expand_runs` (as `list_rows`), `store_in_slots` and `store_new_row` in Triton."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common.launch import dependent_launch, have_equal_strides, power_of_two, unit_stride
from sparsekv.kernels.common.tiles_triton import wait_for_previous_kernel


@triton.jit
def _store_kernel(
    keys, values, new_keys, new_values, slots, rows,
    slot_stride, head_stride, key_head, key_token, value_head, value_token,
    D: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Store one head's key and value of one token, unless the token's row is negative."""
    wait_for_previous_kernel(EARLY)
    token, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_D)
    row = tl.load(rows + token)
    inside = d < tl.where(row < 0, 0, D)
    k = tl.load(new_keys + head * key_head + token * key_token + d, mask=inside)
    v = tl.load(new_values + head * value_head + token * value_token + d, mask=inside)
    place = tl.load(slots + token) * slot_stride + head * head_stride + row * D + d
    tl.store(keys + place, k, mask=inside)
    tl.store(values + place, v, mask=inside)


def store_in_slots_triton(stored, new, slots, rows):
    """Run `store_in_slots` on a GPU; views with a contiguous last axis are read in place, others are copied first."""
    _store(stored, new, slots, rows, *stored[0].stride()[:2])


def store_new_row_triton(stored, new, row):
    """Run `store_new_row` on a GPU; views with a contiguous last axis are read in place, others are copied first."""
    # There is one slot. The stride between slots is 0, so the slot's index has no effect, and `row` is passed for it.
    _store(stored, new, row, row, 0, stored[0].stride(0))


def _store(stored, new, slots, rows, slot_stride, head_stride):
    keys, values = (unit_stride(one) for one in new)
    H, T, D = keys.shape
    assert have_equal_strides(*stored)
    assert stored[0].stride()[-2:] == (D, 1)
    _store_kernel[(T, H)](
        *stored, keys, values, slots, rows, slot_stride, head_stride, *keys.stride()[:2], *values.stride()[:2],
        D=D, BLOCK_D=power_of_two(D), num_warps=1, **dependent_launch(rows.device),
    )  # fmt: skip


SLOTS = 256  # slots that one Triton program writes


@triton.jit(do_not_specialize=["capacity"])
def _rows_kernel(
    starts, ends, rows, runs, starts_stride, ends_stride, rows_stride, capacity,
    STEPS: tl.constexpr, SLOTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the row index of each of a program's slots; a slot is an element of the list of rows.

    The run of a slot is found by a search that divides the runs by four in each step, with three comparisons.
    """
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
    """Write the row indices of runs, run after run, to `rows` [H, capacity or more] int32.

    `starts` [H, R] are the runs' first rows, and `ends` [H, R] the running sums of their lengths. A head's rows past
    `capacity` are left out. Slots after the last row are left unwritten.
    """
    H, R = ends.shape
    _rows_kernel[(triton.cdiv(capacity, SLOTS), H)](
        starts, ends, rows, R, starts.stride(0), ends.stride(0), rows.stride(0), capacity,
        STEPS=(R.bit_length() + 1) // 2, SLOTS=SLOTS, num_warps=4, **dependent_launch(starts.device),
    )  # fmt: skip
