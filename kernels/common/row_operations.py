"""Operations on rows: runs of neighbouring rows, slots of several sequences, and RoPE."""

from functools import lru_cache

import torch

from sparsekv.kernels.common.on_gpu import on_gpu


@on_gpu("sparsekv.kernels.common.run_rows_triton:store_in_slots_triton", tensor=lambda stored: stored[0])
def store_in_slots(
    stored: tuple[torch.Tensor, torch.Tensor],
    new: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Write keys and values of T tokens into the caches of S sequences.

    On a GPU this is one launch. The plain-torch implementation synchronises.

    Args:
        stored: keys and values [S, Hk, capacity, D], contiguous.
        new: keys and values [Hk, T, D] of the tokens.
        slots: [T] int64, the index of each token's sequence.
        rows: [T] int64, each token's row in its sequence, below the capacity. A token with negative row is not stored.
    """
    placed = rows >= 0
    if not placed.all():
        slots, rows, new = slots[placed], rows[placed], (new[0][:, placed], new[1][:, placed])
    for into, of_tokens in zip(stored, new, strict=True):
        into[slots, :, rows] = of_tokens.transpose(0, 1)


def _of_one_size(stored: tuple[torch.Tensor, torch.Tensor], *_: object) -> bool:
    return stored[0].shape == stored[1].shape


@on_gpu(
    "sparsekv.kernels.common.run_rows_triton:store_new_row_triton", tensor=lambda stored: stored[0], fits=_of_one_size
)
def store_new_row(
    stored: tuple[torch.Tensor, torch.Tensor], new: tuple[torch.Tensor, torch.Tensor], row: torch.Tensor
) -> None:
    """Write the key and the value of one token into a cache; on a GPU this is one launch if D = D'.

    Args:
        stored: keys [H, R, D] and values [H, R, D']. The rows of a head are contiguous; heads may have any stride, on a
            GPU the same for keys and values if D = D'.
        new: key [H, 1, D] and value [H, 1, D'] of the token.
        row: [1] int64, the token's row.
    """
    for into, of_token in zip(stored, new, strict=True):
        into.index_copy_(1, row, of_token)


def rotate(rows: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate rows by RoPE to the given positions; negative positions undo a rotation.

    Args:
        rows: [..., T, D].
        positions: [..., T] int64; missing leading dimensions are broadcast.
        frequencies: [P] float32, radians per position of each pair of channels; 2 P at most D.
        interleaved: a pair is channels 2 i and 2 i + 1, else i and i + P. Channels from 2 P on are not rotated.

    Returns:
        [..., T, D] float32. Allocates two more tensors of this size.
    """
    # Angles are float32, as in models, so that undoing a model's rotation uses the same rounded angles.
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = split_pairs(rows.float(), len(frequencies), interleaved)
    rotated = first * cos - second * sin, second * cos + first * sin
    pairs = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat([pairs, rest], -1)


def split_pairs(rows: torch.Tensor, pairs: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split rows into views of the RoPE pairs' first and second channels [..., P] and of the rest [..., D - 2 P].

    `interleaved` is as in `rotate`.
    """
    rotated, rest = rows[..., : 2 * pairs], rows[..., 2 * pairs :]
    if interleaved:
        return rotated[..., 0::2], rotated[..., 1::2], rest
    return rotated[..., :pairs], rotated[..., pairs:], rest


def fill_budget(lengths: torch.Tensor, budget: int) -> torch.Tensor:
    """Cut runs, ordered best first, to `budget` rows in total.

    Whole runs are kept, and then the start of the run that exceeds the budget.

    Args:
        lengths: [..., R] int, best run first.
        budget: number of rows to keep.

    Returns:
        [..., R] lengths, whose sum is the smaller of the budget and the number of all rows.
    """
    before = lengths.cumsum(-1) - lengths
    return torch.minimum((budget - before).clamp(min=0), lengths)


def expand_runs(starts: torch.Tensor, lengths: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand runs to their row indices, run after run, in a fixed number of slots.

    Args:
        starts: [..., R] int, first row of each run.
        lengths: [..., R] int, number of rows of each run; 0 is allowed anywhere.
        capacity: number of slots; further rows are left out.

    Returns:
        rows [..., capacity] int64 (0 in unused slots) and valid [..., capacity] bool.
    """
    ends = lengths.long().cumsum(-1)
    slots = torch.arange(capacity, device=starts.device).expand(*starts.shape[:-1], capacity).contiguous()
    run = torch.searchsorted(ends, slots, right=True)
    valid = run < starts.shape[-1]
    run = run.clamp(max=starts.shape[-1] - 1)
    offset = slots - (ends - lengths).gather(-1, run)
    return torch.where(valid, starts.long().gather(-1, run) + offset, 0), valid


def expand_full_runs(starts: torch.Tensor, lengths: torch.Tensor, capacity: int) -> torch.Tensor:
    """Expand runs that fill all slots to their row indices [..., capacity] int64; `expand_runs` allows unused slots.

    Args:
        starts: [..., R] int64.
        lengths: [..., R] int64, which must sum to `capacity` along the last axis.

    Raises:
        RuntimeError: the sum of all lengths is not the number of slots of the result. Single sums are not checked.
    """
    apart = starts - (lengths.cumsum(-1) - lengths)
    size = capacity * starts.shape[:-1].numel()
    rows = torch.repeat_interleave(apart.flatten(), lengths.flatten(), output_size=size)
    return rows.view(*starts.shape[:-1], capacity).add_(_slots(capacity, starts.device))


@lru_cache(maxsize=4)
def _slots(capacity: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(capacity, device=device)
