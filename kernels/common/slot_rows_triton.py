"""`store_in_slots` in Triton."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common.launch import dependent_launch
from sparsekv.kernels.common.tiles_triton import power_of_two, wait_for_previous_kernel


@triton.jit
def _store_kernel(
    keys, values, new_keys, new_values, slots, rows,
    slot_stride, head_stride, key_head, key_token, value_head, value_token,
    D: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head's row of one token."""
    wait_for_previous_kernel(EARLY)
    token, head, d = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_D)
    row = tl.load(rows + token)
    inside = d < tl.where(row < 0, 0, D)
    k = tl.load(new_keys + head * key_head + token * key_token + d, mask=inside)
    v = tl.load(new_values + head * value_head + token * value_token + d, mask=inside)
    place = tl.load(slots + token) * slot_stride + head * head_stride + row * D + d
    tl.store(keys + place, k, mask=inside)
    tl.store(values + place, v, mask=inside)


def store_in_slots_triton(
    stored: tuple[torch.Tensor, torch.Tensor],
    new: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """`store_in_slots` on a GPU; reads views in place if their last axis is contiguous, and copies them otherwise."""
    keys, values = (one if one.stride(2) == 1 else one.contiguous() for one in new)
    H, T, D = keys.shape
    assert all(one.is_contiguous() for one in stored)
    _store_kernel[(T, H)](
        *stored, keys, values, slots, rows, *stored[0].stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        D=D, BLOCK_D=power_of_two(D), num_warps=1, **dependent_launch(slots.device),
    )  # fmt: skip
