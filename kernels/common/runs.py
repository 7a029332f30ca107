"""Runs of neighbouring rows: turn chosen clusters into row indices, with shapes fixed in advance."""

from functools import lru_cache

import torch


def fill_budget(lengths: torch.Tensor, budget: int) -> torch.Tensor:
    """Cut runs, ordered best first, to `budget` rows in all: whole runs, then the start of the run that exceeds it.

    Args:
        lengths: [..., R] int, in order of score.
        budget: rows to keep.

    Returns:
        [..., R] lengths with sum min(budget, all).
    """
    before = lengths.cumsum(-1) - lengths
    return torch.minimum((budget - before).clamp(min=0), lengths)


def expand_runs(starts: torch.Tensor, lengths: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row indices of runs, run after run, in a fixed number of slots.

    Args:
        starts: [..., R] int, first row of each run.
        lengths: [..., R] int, rows in each run; 0 is allowed anywhere.
        capacity: number of slots; rows that exceed it are left out.

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
    """Row indices [..., capacity] int64 of runs that fill all slots; `expand_runs` allows unused ones.

    Args:
        starts: [..., R] int64.
        lengths: [..., R] int64, each row of which must sum to `capacity`.

    Raises:
        RuntimeError: the lengths do not sum to `capacity` over all rows together.
    """
    apart = starts - (lengths.cumsum(-1) - lengths)
    size = capacity * starts.shape[:-1].numel()
    rows = torch.repeat_interleave(apart.flatten(), lengths.flatten(), output_size=size)
    return rows.view(*starts.shape[:-1], capacity).add_(_slots(capacity, starts.device))


@lru_cache(maxsize=4)
def _slots(capacity: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(capacity, device=device)
