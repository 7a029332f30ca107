"""What several queries choose of a head's keys, together: every key that any of them chose, once."""

import torch

from sparsekv.kernels.codes.types import JoinedKeys
from sparsekv.kernels.tables.types import KeyGroups


def join_chosen(chosen: torch.Tensor, capacity: int, groups: KeyGroups) -> JoinedKeys:
    """Join what B queries of each head chose; counts it in `groups`, whose labels tell how many keys there are.

    On a GPU three kernels, no synchronisation, and the same result in every run. Allocates a byte a key and the rows.

    Args:
        chosen: [H, B, K] int32, keys that may be the same.
        capacity: of the rows of a head; must be enough.
    """
    if chosen.is_cuda:
        from sparsekv.kernels.codes.joined_triton import join_chosen_triton

        with torch.cuda.device_of(chosen):  # Triton launches on the current device, which may be another
            return join_chosen_triton(chosen, capacity, groups)
    return join_chosen_reference(chosen, capacity, groups)


def join_chosen_reference(chosen: torch.Tensor, capacity: int, groups: KeyGroups) -> JoinedKeys:
    """`join_chosen` in plain torch."""
    H, keys = groups.labels.shape
    flags = torch.zeros(H, keys, dtype=torch.int32, device=chosen.device).scatter_(1, chosen.flatten(1).long(), 1)
    groups.taken.scatter_add_(1, groups.labels.long(), flags)
    used, place = flags.sum(1, dtype=torch.int32), flags.cumsum(1) - 1
    rows = torch.zeros(H, capacity + 1, dtype=torch.int32, device=chosen.device)
    every = torch.arange(keys, dtype=torch.int32, device=chosen.device).expand(H, -1)
    rows.scatter_(1, torch.where(flags > 0, place, capacity), every)
    return JoinedKeys(rows[:, :capacity], used)
