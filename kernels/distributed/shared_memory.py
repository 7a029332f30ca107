"""Memory that the GPUs of several ranks all see, in which each leaves the others its part of a sum."""

import os
import socket
from contextlib import suppress
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
    """One rank's view of what is shared. A rank's sums must come one after another, in one stream's order.

    A rank's memory holds two times a place of `MOST_BYTES` for what each rank sends it, in turns, then a number
    [ranks, PROGRAMS] int32 for each program of each rank: how many parts have come.

    Args:
        number: of this rank.
        places: [ranks] int64, addresses of all ranks' memory as this rank's device sees it.
        turns: [PROGRAMS] int32, how many sums each program of this rank has begun.
        held: this rank's memory, and what keeps that of the others mapped: both live as long as this.
    """

    number: int
    places: torch.Tensor
    turns: torch.Tensor
    held: object


def bytes_shared(ranks: int) -> int:
    """Bytes of one rank's memory, where there are so many ranks."""
    return ranks * (2 * MOST_BYTES + 4 * PROGRAMS)


def share_memory(group: dist.ProcessGroup) -> SharedMemory | None:
    """Memory that all GPUs of a group see, each the current one of its rank; all ranks call it.

    Returns:
        None on all ranks where some cannot see the others' memory, as across machines.
    """
    device, size = torch.device("cuda", torch.cuda.current_device()), group.size()
    # Torch's way to share has the ranks wait for each other, so they agree before each step whether to take it.
    if len(set(_told_by_all(group, socket.gethostname()))) > 1:
        return None
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # it can fail on one rank alone, and is not used
    own = None
    with suppress(RuntimeError):  # torch has no class of its own for memory that cannot be shared
        own = symmetric_memory.empty(bytes_shared(size), dtype=torch.uint8, device=device).zero_()
        torch.cuda.synchronize(device)  # nobody may send before the zeros are there
    if not all(_told_by_all(group, own is not None)) or own is None:
        return None
    handle = None
    with suppress(RuntimeError):
        handle = symmetric_memory.rendezvous(own, group)
    if not all(_told_by_all(group, handle is not None)) or handle is None:
        return None
    turns = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
    return SharedMemory(group.rank(), torch.tensor(handle.buffer_ptrs, device=device), turns, (own, handle))


def _told_by_all(group: dist.ProcessGroup, told: object) -> list[object]:
    found: list[object] = [None] * group.size()
    dist.all_gather_object(found, told, group)
    return found
