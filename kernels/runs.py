"""Runs of neighbouring rows: how a choice of clusters becomes rows to read, with shapes fixed in advance."""

import torch


def fill_budget(lengths: torch.Tensor, budget: int) -> torch.Tensor:
    """Cut runs, best first, so that they hold `budget` rows: whole runs, then the start of the one that passes it.

    Args:
        lengths: [..., R] int, in order of score.
        budget: rows to keep.

    Returns:
        [..., R] lengths with sum min(budget, all).
    """
    before = lengths.cumsum(-1) - lengths
    return torch.minimum((budget - before).clamp(min=0), lengths)


def expand_runs(starts: torch.Tensor, lengths: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of runs, one after the other, in a fixed number of slots.

    Args:
        starts: [..., R] int, first row of each run.
        lengths: [..., R] int, rows in each run; 0 is allowed anywhere.
        capacity: slots; rows past it are left out.

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
