"""The end of a choice of clusters, in Triton: which of a part's clusters are taken, and the rows of their tokens.

Part of the last kernel of `budget_choice_triton`, which has found the last rank to take.
"""

import triton
import triton.language as tl

from sparsekv.kernels.clusters.choice_counts_triton import sum_of_two, sums_and_largest
from sparsekv.kernels.clusters.types import TOKEN_BITS

# A number of tokens or members takes the lowest TOKEN_BITS bits of what is packed in one integer.
TOKENS, SIZE_MASK = tl.constexpr(TOKEN_BITS), tl.constexpr(2**TOKEN_BITS - 1)


@triton.jit
def _write_members(
    scratch, number, longest, rows, slots, order, known, starts, begins, lengths,
    ENTRIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the rows of the first `lengths` members of the `known` clusters, from slot `begins` of each on.

    Usually few clusters are taken: these are first compacted in scratch memory, from which each thread then reads the
    clusters whose members it writes.
    """
    tl.store(scratch + 4 * order, starts, mask=known)
    tl.store(scratch + 4 * order + 1, begins, mask=known)
    tl.store(scratch + 4 * order + 2, lengths, mask=known)
    tl.debug_barrier()
    member = tl.broadcast_to(tl.arange(0, WIDTH)[:, None], [WIDTH, ENTRIES])
    for at in range(0, number, ENTRIES):
        entry = at + tl.broadcast_to(tl.arange(0, ENTRIES)[None, :], [WIDTH, ENTRIES])
        place = scratch + 4 * entry
        start_of = tl.load(place, mask=entry < number, other=0)
        begin = tl.load(place + 1, mask=entry < number, other=0)
        length = tl.load(place + 2, mask=entry < number, other=0)
        length = tl.minimum(length, slots - begin)
        for first in range(0, longest, WIDTH):
            tl.store(rows + begin + first + member, start_of + first + member, mask=first + member < length)


@triton.jit
def take_members(
    rank, size, number, starts, last, held, had, above, equal, equal_size, budget, wanted,
    lengths, log_left, rows, slots, scratch, used, seen, head, inside,
    ENTRIES: tl.constexpr, WIDTH: tl.constexpr, OPEN: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Write what is taken of a part's clusters: all above the last rank, then of that rank until the budget is reached.

    `held` and `had` are tokens and members of all clusters above the last rank. Of the parts before this one, `above`
    are the members above that rank, `equal` the members at it, and `equal_size` the tokens at it.
    """
    above_number, equal_number = tl.where(rank > last, number, 0), tl.where(rank == last, number, 0)
    # Clusters of the last rank can be taken if the parts before leave some budget; the scan finds how many.
    room = (held + equal_size < budget) | (had + equal < wanted) if OPEN else held + equal < budget
    known = above_number + tl.where(room, equal_number, 0) > 0
    # Three running sums packed in one integer: with fewer registers each, more programs run at the same time.
    ends = (known.to(tl.int64) << (2 * TOKENS)) | (equal_number.to(tl.int64) << TOKENS) | above_number
    if OPEN:
        sizes = tl.where(rank == last, size, 0)
        ends, sizes_ends = tl.associative_scan((ends, sizes), 0, sum_of_two)
    else:
        ends = tl.cumsum(ends, 0)
    equal_begins = equal + ((ends >> TOKENS) & SIZE_MASK).to(tl.int32) - equal_number
    if OPEN:
        held_before = held + equal_size + sizes_ends - sizes
        opened = (rank == last) & ((held_before < budget) | (had + equal_begins < wanted))
        taken = above_number + tl.where(opened, number, 0)
        left = tl.where(opened | (rank > last), 0, size)
    else:
        taken = above_number + tl.minimum(tl.maximum(budget - held - equal_begins, 0), equal_number)
        left = size - taken
    tl.store(lengths, taken, mask=inside)
    log_of_left = tl.where(left > 0, tl.log(tl.maximum(left, 1).to(tl.float32)), -float("inf"))
    tl.store(log_left, log_of_left, mask=inside)
    clusters, count, longest = tl.reduce((known.to(tl.int32), taken, taken), 0, sums_and_largest)
    slot = tl.where(rank > last, above + (ends & SIZE_MASK).to(tl.int32) - above_number, had + equal_begins)
    order = (ends >> (2 * TOKENS)).to(tl.int32) - 1
    _write_members(scratch, clusters, longest, rows, slots, order, known, starts, slot, taken, ENTRIES, WIDTH)
    if count > 0:
        tl.atomic_add(used + head, count, sem="relaxed")
        if SEEN:
            tl.atomic_add(seen + head, count.to(tl.int64), sem="relaxed")
