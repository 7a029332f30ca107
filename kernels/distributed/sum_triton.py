"""All-reduce of small tensors in one Triton launch.

A rank's part is the tensor that it adds to the sum. Each program sends a piece of its rank's part to every other rank,
waits for the same piece of the other ranks' parts, and sums the pieces.

There are two buffers, and so all-reduce n overwrites the parts of all-reduce n - 2. This is safe. A rank begins
all-reduce n only after all ranks have sent their parts of n - 1, and a rank sends its part of n - 1 only after it has
read all parts of n - 2.
"""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.distributed.shared_memory import MOST_BYTES, PROGRAM_BYTES, PROGRAMS, SharedMemory


@triton.jit(do_not_specialize=["this"])
def _sum_kernel(
    part, total, places, turns, numbers, this,
    RANKS: tl.constexpr, MOST: tl.constexpr, BYTES: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one program's piece of an all-reduce over RANKS ranks.

    `this` is the index of this rank. A rank's buffer for one part has MOST elements, which are BYTES bytes.
    """
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    own = tl.load(part + at, mask=inside, other=0.0)
    turn = tl.load(turns + program) + 1
    half = (turn & 1) * (RANKS * MOST)
    sent: tl.constexpr = tl.pointer_type(part.dtype.element_ty)
    come: tl.constexpr = 2 * RANKS * BYTES
    for rank in tl.static_range(RANKS):
        place = tl.multiple_of(tl.load(places + rank).to(sent), 16)
        tl.store(place + half + this * MOST + at, own, mask=inside)
    tl.debug_barrier()
    for rank in tl.static_range(RANKS):
        if rank != this:
            number = (tl.load(places + rank) + come).to(tl.pointer_type(tl.int32)) + this * PROGRAMS + program
            tl.atomic_xchg(number, turn, sem="release", scope="sys")
    here = tl.load(places + this)
    for rank in tl.static_range(RANKS):
        if rank != this:
            number = (here + come).to(tl.pointer_type(tl.int32)) + rank * PROGRAMS + program
            while tl.atomic_add(number, 0, sem="acquire", scope="sys") - turn < 0:
                pass
    tl.debug_barrier()
    added = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):  # all ranks add in this order, so that their sums are bitwise equal
        place = tl.multiple_of(here.to(sent), 16) + half + rank * MOST + at
        # Another GPU wrote this piece during the launch, and so the load must bypass the L1 cache.
        added += tl.load(place, mask=inside, other=0.0, volatile=True).to(tl.float32)
    tl.store(total + at, added.to(own.dtype), mask=inside)
    tl.store(turns + program, turn)


def sum_triton(part: torch.Tensor, memory: SharedMemory) -> torch.Tensor:
    """Sum the ranks' parts like `torch.distributed.all_reduce`, and return the sum on each rank; all ranks call this.

    Only the result is allocated, and the host does not wait. The results of all ranks are bitwise equal.

    Args:
        part: [...] contiguous, with the same shape and floating dtype on all ranks, at most `MOST_BYTES`.
    """
    total, size = torch.empty_like(part), part.element_size()
    block = PROGRAM_BYTES // size
    _sum_kernel[(triton.cdiv(part.numel(), block),)](
        part, total, memory.places, memory.turns, part.numel(), memory.number,
        RANKS=len(memory.places), MOST=MOST_BYTES // size, BYTES=MOST_BYTES, PROGRAMS=PROGRAMS, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return total
