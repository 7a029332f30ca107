"""Choice of the best clusters within a budget by their logits, in Triton.

The kernels find the rank of the last cluster that is taken, without a sort. A rank is the leading bits of a score. A
cluster's members are its tokens or, if it is opened, its children. A head's clusters are split into parts.

1. The first kernel counts each part's tokens by the exponent of the score.
2. The second kernel finds the exponent of the last cluster that is taken. It counts the tokens of clusters with this
   exponent by the fraction bits of the rank.
3. In the third kernel, each part finds the last rank and the number of members that earlier parts take. Then it writes
   its own members.

The second kernel is left out if clusters are opened, because these are ranked by the exponent alone. It is also left
out if there is a threshold: the rank is then 1 for clusters that reach the threshold, else 0. All sums are sums of
integers, and so the order of execution does not change the result.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparsekv.kernels.clusters.cluster_choice import (
    EXPONENT_BITS,
    OPENED_BITS,
    SCORE_BITS,
    TOKEN_BITS,
    ClusterChoice,
    least_rank,
)
from sparsekv.kernels.common import tiles_triton as common
from sparsekv.kernels.common.launch import ALIGNED, aligned, count_sms, dependent_launch, power_of_two

# Integers after a part's counts. `_count_kernel` writes two results there. With three such integers, row lengths are
# not multiples of 4. Otherwise Triton would load four counts at once, and convert their layout before the sum.
LIMITS = tl.constexpr(3)


@triton.jit
def sums_and_largest(a, b, c, d, e, f):
    return a + d, b + e, tl.maximum(c, f)


@triton.jit
def later(place, a, b, c, d, e, other, f, g, h, i, j):
    """Return the higher of two histogram bins (`place`) with its values: the combine function of a reduction."""
    here = place > other
    a, b, c = tl.where(here, a, f), tl.where(here, b, g), tl.where(here, c, h)
    return tl.maximum(place, other), a, b, c, tl.where(here, d, i), tl.where(here, e, j)


@triton.jit
def by_place(place, size, number, SIZE: tl.constexpr, OPEN: tl.constexpr):
    """Sum the clusters' token counts `size` by histogram bin `place`; return [SIZE].

    With OPEN, the sums of the clusters' member counts `number` follow, [2 SIZE] in all.
    """
    column = tl.arange(0, 2 * SIZE if OPEN else SIZE)[None, :]
    amount = tl.where(column < SIZE, size[:, None], number[:, None]) if OPEN else size[:, None]
    return tl.sum(tl.where(place[:, None] == column % SIZE, amount, 0), 0)


@triton.jit
def counted(counts, head, part, others, SIZE: tl.constexpr, PARTS: tl.constexpr, OPEN: tl.constexpr):
    """Sum counts of tokens and members in each histogram bin over all parts of a head, and over parts before `part`.

    The four results [SIZE] are tokens of all parts, tokens of earlier parts, members of all parts, and members of
    earlier parts. Without OPEN, the members are the tokens.
    """
    other = tl.arange(0, PARTS)[:, None]
    row: tl.constexpr = (2 * SIZE if OPEN else SIZE) + LIMITS
    place = counts + (head * others + other) * row + tl.arange(0, SIZE)[None, :]
    sizes = tl.load(place, mask=other < others, other=0)
    before = tl.where(other < part, sizes, 0)
    if OPEN:
        numbers = tl.load(place + SIZE, mask=other < others, other=0)
        numbers_before = tl.where(other < part, numbers, 0)
        sizes, before, numbers, numbers_before = tl.reduce(
            (sizes, before, numbers, numbers_before), 0, common.sum_of_four
        )
    else:
        sizes, before = tl.reduce((sizes, before), 0, common.sum_of_two)
        numbers, numbers_before = sizes, before
    return sizes, before, numbers, numbers_before


@triton.jit
def last_place(
    sizes, before, numbers, numbers_before, held, had, budget, wanted, SIZE: tl.constexpr, OPEN: tl.constexpr
):
    """Find the lowest histogram bin of ranks from which clusters are taken; 0 if the budget is not reached.

    `held` and `had` are the numbers of tokens and of members whose ranks are above all these bins. Also return `held`
    plus the number of tokens in higher bins, and `had` plus the number of members in higher bins. The last three
    results are counts over the parts before this part: members above the found bin, members in it, and tokens in it.
    """
    place = tl.arange(0, SIZE)
    if OPEN:
        from_here, numbers_from_here, before_from_here = tl.associative_scan(
            (sizes, numbers, numbers_before), 0, common.sum_of_three, reverse=True
        )
        enough = (held + from_here >= budget) & (had + numbers_from_here >= wanted)
    else:
        from_here, before_from_here = tl.associative_scan((sizes, numbers_before), 0, common.sum_of_two, reverse=True)
        numbers_from_here, enough = from_here, held + from_here >= budget
    above, numbers_above = from_here - sizes, numbers_from_here - numbers
    found = tl.where(enough | (place == 0), place, -1)
    last, above, numbers_above, before_above, equal, equal_size = tl.reduce(
        (found, above, numbers_above, before_from_here - numbers_before, numbers_before, before), 0, later
    )
    return last, held + above, had + numbers_above, before_above, equal, equal_size


# In a packed integer, the lowest TOKEN_BITS bits hold a number of tokens or members.
TOKENS, SIZE_MASK = tl.constexpr(TOKEN_BITS), tl.constexpr(2**TOKEN_BITS - 1)


@triton.jit
def _write_members(
    scratch, number, longest, rows, slots, order, known, starts, begins, lengths,
    ENTRIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the rows of the first `lengths` members of each cluster in `known` to slots from `begins` on.

    `number` is the number of these clusters, and `longest` at least the largest of their lengths. Usually few clusters
    are taken. Therefore the taken clusters are first compacted in scratch memory, at the indices `order`. Each thread
    then reads the clusters whose members it writes.
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
    """Write the members taken from a part's clusters.

    All clusters above the last rank are taken, then clusters of the last rank until the budget is reached. `held` and
    `had` are the numbers of tokens and members in all clusters above the last rank. The other counts are over the parts
    before this part: `above` members above the last rank, `equal` members of the last rank, and `equal_size` tokens of
    the last rank.
    """
    above_number, equal_number = tl.where(rank > last, number, 0), tl.where(rank == last, number, 0)
    # If the clusters above the last rank, and earlier parts' clusters of the last rank, do not fill the budget, this
    # part also takes clusters of the last rank. The scan below finds how many.
    room = (held + equal_size < budget) | (had + equal < wanted) if OPEN else held + equal < budget
    known = above_number + tl.where(room, equal_number, 0) > 0
    # Three running sums are packed in one integer, because with fewer registers each, more programs run at once.
    ends = (known.to(tl.int64) << (2 * TOKENS)) | (equal_number.to(tl.int64) << TOKENS) | above_number
    if OPEN:
        sizes = tl.where(rank == last, size, 0)
        ends, sizes_ends = tl.associative_scan((ends, sizes), 0, common.sum_of_two)
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
    # Only members that have slots are counted. Slots may be too few with a threshold, and for opened clusters. With a
    # threshold, all taken clusters are above the last rank.
    if OPEN:
        higher = tl.sum(above_number, 0)
        count = tl.minimum(count - higher, tl.maximum(slots - had - equal, 0))
        count += tl.minimum(higher, tl.maximum(slots - above, 0))
    else:
        count = tl.minimum(count, tl.maximum(slots - above, 0))
    _write_members(scratch, clusters, longest, rows, slots, order, known, starts, slot, taken, ENTRIES, WIDTH)
    if count > 0:
        tl.atomic_add(used + head, count, sem="relaxed")
        if SEEN:
            tl.atomic_add(seen + head, count.to(tl.int64), sem="relaxed")


# Measured limits of the number of clusters in a part. There are three minima: in general, for opening clusters, and for
# listed clusters, about half of whose slots are filled. A part has more than MOST clusters only if there would
# otherwise be more than MOST_PARTS parts.
FEWEST, FEWEST_OPENED, FEWEST_LISTED, MOST, MOST_PARTS = 512, 256, 256, 1024, 64
CLUSTERS_A_WARP = 256
ENTRIES, WIDTH = 128, 8  # clusters whose members are written at once, and members of each that are written in one step
SCORE = tl.constexpr(SCORE_BITS)
BINS, FINE = (tl.constexpr(2**bits) for bits in (EXPONENT_BITS, SCORE_BITS))
ROW = tl.constexpr(ALIGNED)


@dataclass(frozen=True)
class Scored:
    """Clusters to choose from, with their logits.

    `logits` is [H, G, stride], minus infinity for empty clusters. `numbers` [H, stride] int32 counts the clusters'
    tokens. `peaks` and `totals` [H, G, parts] are the maxima and the sums of exponentials of the softmax over parts of
    the clusters. `used` and `queue` [H] int32 are zeros, for these fields of `ClusterChoice`. The first `known` [H]
    int32 clusters are valid, or all if `known` is None.
    """

    logits: torch.Tensor
    numbers: torch.Tensor
    peaks: torch.Tensor
    totals: torch.Tensor
    used: torch.Tensor
    queue: torch.Tensor
    known: torch.Tensor | None = None


@triton.jit
def _logsumexp(peaks, totals, head, g, parts, G: tl.constexpr, PARTS: tl.constexpr):
    """Compute the log-sum-exp [GROUP] over all parts; 0 past the last query head."""
    part = tl.arange(0, PARTS)
    place = (head * G + g[:, None]) * parts + part
    known = (g[:, None] < G) & (part < parts)
    part_peaks = tl.load(peaks + place, mask=known, other=-float("inf"))
    part_totals = tl.load(totals + place, mask=known, other=0.0)
    peak = tl.max(part_peaks, 1)
    # If every cluster is empty, the peak is minus infinity, and all scores are 0.
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(part_totals * tl.exp(part_peaks - peak[:, None]), 1)
    return tl.where(g < G, peak + tl.log(tl.maximum(total, 1e-30)), 0.0)


@triton.jit
def _packed(logits, numbers, peaks, totals, head, c, inside, stride, parts, least, threshold, G: tl.constexpr,
            GROUP: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr, BITS: tl.constexpr):  # fmt: skip
    """Compute the ranks of clusters `c` of a head, and pack each with the cluster's token count in one integer.

    The rank is in the upper bits, the token count in the lower ones. With KEEP the rank is 1 for scores that reach the
    threshold, else 0.
    """
    g = tl.arange(0, GROUP)
    size = tl.load(numbers + c, mask=inside, other=0)
    # The logits are loaded before the log-sum-exp, so that both loads overlap.
    known = inside[:, None] & (g < G)
    logit = tl.load(logits + g * stride + c[:, None], mask=known, other=-float("inf"))
    score = tl.sum(tl.exp(logit - _logsumexp(peaks, totals, head, g, parts, G, PARTS)), 1)
    if KEEP:
        rank = (score / G >= threshold).to(tl.int32)
    else:
        rank = ((score / G).to(tl.int32, bitcast=True) >> (23 - BITS)) - least
        rank = tl.minimum(tl.maximum(rank, 0), (BINS << BITS) - 1)
    return (rank.to(tl.uint32) << TOKENS) | size.to(tl.uint32)


@triton.jit
def _share(part, parts, used, head, stride, PART: tl.constexpr, USED: tl.constexpr):
    """Return a part's clusters [PART], a mask of the valid clusters, and the end of the last part."""
    size, stop = PART, stride
    if USED:
        # Only the valid clusters are split evenly over the parts.
        stop = tl.cdiv(tl.minimum(tl.load(used + head), stride), ROW) * ROW
        size = tl.cdiv(stop // ROW, parts) * ROW
    c = tl.multiple_of(part * size, ROW) + tl.arange(0, PART)
    return c, c < tl.minimum((part + 1) * size, stop), stop


@triton.jit
def _rank(packed):
    return (packed >> TOKENS).to(tl.int32)


@triton.jit
def _size(packed):
    return (packed & SIZE_MASK).to(tl.int32)


@triton.jit(do_not_specialize=["least"])
def _rank_kernel(
    logits, numbers, children, peaks, totals, known, ranked, coarse, stride, clusters, parts, least, threshold,
    G: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr,
    OPEN: tl.constexpr, KNOWN: tl.constexpr, BITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the ranks of a part's clusters, and count their tokens by exponent; with OPEN also their children."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c, inside, _ = _share(part, tl.num_programs(0), known, head, stride, PART, KNOWN)
    if OPEN:
        # No earlier launch writes the numbers of children, and so they are read before the wait.
        of_cluster = tl.load(children + head * clusters + c, mask=inside & (c < clusters), other=0)
    common.wait_for_previous_kernel(EARLY)
    packed = _packed(
        logits + head * G * stride, numbers + head * stride, peaks, totals, head, c, inside, stride, parts, least,
        threshold, G, GROUP, PARTS, KEEP, BITS,
    )  # fmt: skip
    tl.store(ranked + head * stride + c, packed.to(tl.int32, bitcast=True), mask=inside)
    size = _size(packed)
    number = of_cluster if OPEN else size
    counts = by_place(_rank(packed) if KEEP else _rank(packed) >> BITS, size, number, BINS, OPEN)
    counted_bins: tl.constexpr = 2 * BINS if OPEN else BINS
    place = coarse + (head * tl.num_programs(0) + part) * (counted_bins + LIMITS)
    tl.store(place + tl.arange(0, counted_bins), counts)


# `stride` is not specialised: if Triton knew that `stride` is a multiple of 16, it would load four ranks at once, and
# convert their layout before the sum.
@triton.jit(do_not_specialize=["budget", "stride"])
def _count_kernel(
    ranked, known, coarse, fine, stride, budget,
    PART: tl.constexpr, OTHERS: tl.constexpr, KNOWN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Find the exponent of the last taken cluster's score; write it, and the counts above it, after a part's counts.

    The part's counts are those of the tokens of its clusters with this exponent, by the fraction bits of the rank.
    """
    part, others, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    c, inside, _ = _share(part, others, known, head, stride, PART, KNOWN)
    place = fine + (head * others + part) * (FINE + LIMITS)
    # No earlier launch that may still run uses this memory, and so it is written before the wait.
    tl.store(place + tl.arange(0, FINE), tl.zeros([FINE], tl.int32))
    common.wait_for_previous_kernel(EARLY)
    packed = tl.load(ranked + head * stride + c, mask=inside, other=0).to(tl.uint32, bitcast=True)
    sizes, before, numbers, numbers_before = counted(coarse, head, part, others, BINS, OTHERS, False)
    last, held, _, above, _, _ = last_place(sizes, before, numbers, numbers_before, 0, 0, budget, 0, BINS, False)
    limits = place + FINE
    tl.store(limits, (last << TOKENS) | held)
    tl.store(limits + 1, above)
    size, rank = _size(packed), _rank(packed)
    tl.debug_barrier()
    tl.atomic_add(place + (rank & (FINE - 1)), size, mask=(rank >> SCORE == last) & (size > 0), sem="relaxed")


@triton.jit(do_not_specialize=["budget", "wanted", "stride"])
def _take_kernel(
    logits, ranked, children, known, coarse, fine, starts, lengths, log_left, rows, scratch, used, seen,
    stride, clusters, starts_stride, rows_stride, slots, budget, wanted, G: tl.constexpr, GROUP: tl.constexpr,
    PART: tl.constexpr, OTHERS: tl.constexpr, KEEP: tl.constexpr, OPEN: tl.constexpr, KNOWN: tl.constexpr,
    SEEN: tl.constexpr, ENTRIES: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the members that a part takes, after the members of earlier parts."""
    part, others, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    c, inside, stop = _share(part, others, known, head, stride, PART, KNOWN)
    lengths, log_left = lengths + head * stride, log_left + head * stride
    if KNOWN:
        # The slots from the last valid cluster to the end of the row are written as empty clusters. No other kernel
        # writes them.
        empty, g = part * PART + tl.arange(0, PART), tl.arange(0, GROUP)
        after = (empty >= stop) & (empty < stride)
        tl.store(starts + head * starts_stride + empty, tl.zeros([PART], tl.int32), mask=after)
        tl.store(lengths + empty, tl.zeros([PART], tl.int32), mask=after)
        tl.store(log_left + empty, tl.full([PART], -float("inf"), tl.float32), mask=after)
        place = logits + head * G * stride + g * stride + empty[:, None]
        tl.store(place, tl.full([PART, GROUP], -float("inf"), tl.float32), mask=after[:, None] & (g < G))
    first_row = tl.load(starts + head * starts_stride + c, mask=inside & (c < clusters), other=0, cache_modifier=".cg")
    if OPEN:
        number = tl.load(children + head * clusters + c, mask=inside & (c < clusters), other=0)
    if KEEP or OPEN:
        common.wait_for_previous_kernel(EARLY)
    # Without KEEP and OPEN, this load may precede the wait below, because `_rank_kernel` is done: `_count_kernel` waits
    # for `_rank_kernel` before it lets this kernel launch.
    packed = tl.load(ranked + head * stride + c, mask=inside, other=0, cache_modifier=".cg").to(tl.uint32, bitcast=True)
    size, rank = _size(packed), _rank(packed)
    if KEEP:
        last, held, had, equal, equal_size = 0, 0, 0, 0, 0
        _, _, _, before = counted(coarse, head, part, others, BINS, OTHERS, OPEN)
        above = tl.sum(tl.where(tl.arange(0, BINS) > 0, before, 0), 0)
    elif OPEN:
        sizes, before, numbers, numbers_before = counted(coarse, head, part, others, BINS, OTHERS, OPEN)
        last, held, had, above, equal, equal_size = last_place(
            sizes, before, numbers, numbers_before, 0, 0, budget, wanted, BINS, OPEN
        )
    else:
        common.wait_for_previous_kernel(EARLY)
        limits = fine + (head * others + part) * (FINE + LIMITS) + FINE
        of_exponent, above = tl.load(limits), tl.load(limits + 1)
        high, held = of_exponent >> TOKENS, of_exponent & SIZE_MASK
        sizes, before, numbers, numbers_before = counted(fine, head, part, others, FINE, OTHERS, OPEN)
        low, held, had, above_low, equal, equal_size = last_place(
            sizes, before, numbers, numbers_before, held, held, budget, 0, FINE, OPEN
        )
        last, above = (high << SCORE) + low, above + above_low
    if not OPEN:
        number = size
    take_members(
        rank, size, number, first_row.to(tl.int32), last, held, had, above, equal, equal_size, budget, wanted,
        lengths + c, log_left + c, rows + head * rows_stride, slots, scratch + (head * others + part) * (4 * PART),
        used, seen, head, inside, ENTRIES, WIDTH, OPEN, SEEN,
    )  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """Goal of a choice of clusters, and the members that the clusters have.

    Without `threshold` and `children`, the best clusters are chosen that hold `budget` tokens. With `threshold`, all
    clusters whose score reaches it are chosen. With `children`, clusters are opened until they have `budget` tokens and
    `wanted` children.

    `starts` [H, C] int is the first member of each cluster, a token's row or a child, written before the ranks are
    computed. For listed clusters, the kernels write zeros past the last cluster. At most `slots` members of a head are
    listed. `children` [H, C] int32 is the number of each cluster's children, contiguous and written before the logits
    are computed. The number of members listed is added to `seen` [H] int64, unless `seen` is None.
    """

    starts: torch.Tensor
    slots: int
    budget: int
    threshold: float | None = None
    children: torch.Tensor | None = None
    wanted: int = 0
    seen: torch.Tensor | None = None


def choose(scored: Scored, clusters: int, take: Wanted) -> ClusterChoice:
    """Choose among the first `clusters` clusters of each head by their logits, for the goal `take`."""
    (H, G, stride), parts, device = scored.logits.shape, scored.peaks.shape[2], scored.logits.device
    keep, opened, early = take.threshold is not None, take.children is not None, dependent_launch(device)
    fewest = FEWEST_OPENED if opened else FEWEST if scored.known is None else FEWEST_LISTED
    size = min(max(power_of_two(triton.cdiv(H * stride, 2 * count_sms(device))), fewest), MOST)
    size = max(size, power_of_two(triton.cdiv(stride, MOST_PARTS)))
    grid, others = (triton.cdiv(stride, size), H), power_of_two(triton.cdiv(stride, size))
    children = scored.numbers if take.children is None else take.children
    bits = OPENED_BITS if opened else SCORE_BITS
    ranked, lengths = torch.empty(2, H, stride, dtype=torch.int32, device=device)
    scratch = torch.empty(H, grid[0], size, 4, dtype=torch.int32, device=device)
    log_left = torch.empty(H, stride, device=device)
    coarse, fine = (
        torch.empty(H, grid[0], counts + LIMITS.value, dtype=torch.int32, device=device)
        for counts in ((2 if opened else 1) * BINS.value, FINE.value)
    )
    rows = torch.empty(H, aligned(max(take.slots, 1)), dtype=torch.int32, device=device)
    known = scored.used if scored.known is None else scored.known
    how = {
        "PART": size,
        "KNOWN": scored.known is not None,
        "num_warps": min(32, max(4, size // CLUSTERS_A_WARP)),
        **early,
    }
    _rank_kernel[grid](
        scored.logits, scored.numbers, children, scored.peaks, scored.totals, known, ranked, coarse,
        stride, children.shape[1], parts, least_rank(take.budget, bits), take.threshold or 0.0,
        G=G, GROUP=power_of_two(G), PARTS=power_of_two(parts), KEEP=keep, OPEN=opened, BITS=bits, **how,
    )  # fmt: skip
    if not keep and not opened:
        _count_kernel[grid](ranked, known, coarse, fine, stride, take.budget, OTHERS=others, **how)
    _take_kernel[grid](
        scored.logits, ranked, children, known, coarse, fine, take.starts, lengths, log_left, rows, scratch,
        scored.used, scored.used if take.seen is None else take.seen, stride, clusters, take.starts.stride(0),
        rows.shape[1], take.slots, take.budget, take.wanted, G=G, GROUP=power_of_two(G), OTHERS=others, KEEP=keep,
        OPEN=opened, SEEN=take.seen is not None, ENTRIES=ENTRIES, WIDTH=WIDTH, **how,
    )  # fmt: skip
    return ClusterChoice(scored.logits, lengths[:, :clusters], log_left, rows, scored.used, scored.queue)
