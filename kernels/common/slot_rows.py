"""Stores new rows of several sequences, each at its place among the sequence's own."""

import torch


def store_in_slots(
    stored: tuple[torch.Tensor, torch.Tensor],
    new: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Write keys and values of T tokens into those of S sequences; on a GPU in one launch.

    Args:
        stored: keys and values [S, Hk, capacity, D], contiguous.
        new: keys and values [Hk, T, D] of the tokens.
        slots, rows: [T] int64: each token's sequence, and its place there, below the capacity. A token whose place is
            below zero is not stored.
    """
    if slots.is_cuda:
        from sparsekv.kernels.common.slot_rows_triton import store_in_slots_triton

        with torch.cuda.device_of(slots):  # Triton launches on the current device, which may be another
            return store_in_slots_triton(stored, new, slots, rows)
    return store_in_slots_reference(stored, new, slots, rows)


def store_in_slots_reference(
    stored: tuple[torch.Tensor, torch.Tensor],
    new: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """`store_in_slots` in plain torch; syncs."""
    placed = rows >= 0
    if not placed.all():
        slots, rows, new = slots[placed], rows[placed], (new[0][:, placed], new[1][:, placed])
    for into, of_tokens in zip(stored, new, strict=True):
        into[slots, :, rows] = of_tokens.transpose(0, 1)
