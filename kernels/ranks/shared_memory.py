"""Memory that the GPUs of several ranks all see, in which each leaves the others its part of a sum."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

MOST_BYTES = 64 * 1024
"""Of a part: each rank sends all of it to every other, which NCCL does better with more."""
PROGRAM_BYTES = 2048  # that one program sends and adds up, in the memory's same place whatever the dtype
PROGRAMS = MOST_BYTES // PROGRAM_BYTES


@dataclass(frozen=True)
class SharedMemory:
    """One rank's view of what is shared.

    A rank's memory holds two times a place of `MOST_BYTES` for what each rank sends it, in turns, then a number
    [ranks, PROGRAMS] int32 for each program of each rank: how many parts have come.

    Args:
        number: of this rank.
        places: [ranks] int64, addresses of all ranks' memory as this rank's device sees it.
        turns: [PROGRAMS] int32, how many sums each program of this rank has begun.
        own: this rank's memory, which lives as long as this.
    """

    number: int
    places: torch.Tensor
    turns: torch.Tensor
    own: torch.Tensor


def bytes_shared(ranks: int) -> int:
    """Bytes of one rank's memory, where there are so many ranks."""
    return ranks * (2 * MOST_BYTES + 4 * PROGRAMS)


def share_memory(group: dist.ProcessGroup) -> SharedMemory | None:
    """Memory that all GPUs of a group see, each the current one of its rank; all ranks call it.

    Returns:
        None on all ranks where some cannot see the others' memory, as across machines.
    """
    device, size = torch.device("cuda", torch.cuda.current_device()), group.size()
    found = [False] * size
    own, addresses = None, None
    try:
        own = symmetric_memory.empty(bytes_shared(size), dtype=torch.uint8, device=device).zero_()
        addresses = symmetric_memory.rendezvous(own, group).buffer_ptrs
        torch.cuda.synchronize(device)  # nobody may send before the zeros are there
    except RuntimeError:  # torch has no class of its own for memory that cannot be shared
        addresses = None
    dist.all_gather_object(found, addresses is not None, group)
    if own is None or addresses is None or not all(found):
        return None
    turns = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
    return SharedMemory(group.rank(), torch.tensor(addresses, device=device), turns, own)
