"""Memory that the GPUs of all ranks can access, through which ranks exchange their parts of an all-reduce."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

MOST_BYTES = 64 * 1024
"""Maximum bytes of a rank's part. Each rank sends its part to every other rank; NCCL is faster for larger parts."""
PROGRAM_BYTES = 2048  # bytes that one program sends and sums, so that its bytes are in the same place for all dtypes
PROGRAMS = MOST_BYTES // PROGRAM_BYTES


@dataclass(frozen=True)
class SharedMemory:
    """One rank's view of the shared memory; a rank's all-reduces must run one after another, in stream order.

    A rank's part is the tensor that it adds to an all-reduce. Each program of the kernel sends a piece of
    `PROGRAM_BYTES` of the part. A rank's memory has two buffers, which consecutive all-reduces use in turn. Each
    buffer has `MOST_BYTES` for the part of every rank. Counters [ranks, PROGRAMS] int32 follow the buffers: the number
    of pieces that each program of each rank has sent to this rank.

    Args:
        number: index of this rank.
        places: [ranks] int64, addresses of all ranks' memory in the address space of this rank's device.
        turns: [PROGRAMS] int32, the number of all-reduces that each program of this rank has completed.
        held: this rank's memory and the handle that keeps the other ranks' memory mapped, kept alive by this object.
    """

    number: int
    places: torch.Tensor
    turns: torch.Tensor
    held: object


def bytes_shared(ranks: int) -> int:
    """Compute the bytes of one rank's memory in a group of `ranks` ranks."""
    return ranks * (2 * MOST_BYTES + 4 * PROGRAMS)


def share_memory(group: dist.ProcessGroup) -> SharedMemory | None:
    """Allocate memory that the current GPUs of all ranks of a group can access; all ranks must call this.

    Returns:
        The memory; or None on all ranks, if a rank cannot access another rank's memory, as across machines.
    """
    device, size = torch.device("cuda", torch.cuda.current_device()), group.size()
    # Torch's functions for sharing memory make the ranks wait for each other. Therefore the ranks agree before each
    # step whether all of them will take it.
    if len(set(_told_by_all(group, socket.gethostname()))) > 1:
        return None
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # unused, and it can fail on a single rank
    own = None
    with suppress(RuntimeError):  # torch has no specific exception for memory that cannot be shared
        own = symmetric_memory.empty(bytes_shared(size), dtype=torch.uint8, device=device).zero_()
        torch.cuda.synchronize(device)  # no rank may send before the zeros are written
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
