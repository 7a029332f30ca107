"""The best clusters to a budget, from their logits, in Triton.

A choice to a budget needs no sort: what is looked for is the rank of the last cluster that is taken, the leading bits
of its score. Parts of a head's clusters count their tokens by the exponent of the score; then, of those that have the
last one's exponent, by the rest of the rank; then each part knows that rank, and what those before it take, and lists
what it takes itself. All in integers, and each part by itself, so that no order of theirs changes anything.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparsekv.kernels.cluster_choice import EXPONENT_BITS, SCORE_BITS, TOKEN_BITS, ClusterChoice, least_rank
from sparsekv.kernels.launch import following, multiprocessors
from sparsekv.kernels.tiles_triton import aligned, power_of_two, start

FEWEST, MOST, MOST_PARTS = 512, 2048, 64  # clusters of a part; more than so many parts make these larger
CLUSTERS_A_WARP = 256
ENTRIES, WIDTH = 128, 8  # clusters whose members are written together, and how many of each
SCORE, TOKENS, SIZE_MASK = (tl.constexpr(number) for number in (SCORE_BITS, TOKEN_BITS, 2**TOKEN_BITS - 1))
BINS, FINE = (tl.constexpr(2**bits) for bits in (EXPONENT_BITS, SCORE_BITS))


@dataclass(frozen=True)
class Scored:
    """Clusters that were looked up: logits [H, G, stride], minus infinity where there are no tokens; their numbers of
    tokens [H, stride] int32; of parts of them peaks and totals [H, G, parts] of the softmax; and [H] int32 zeros to
    count in."""

    logits: torch.Tensor
    numbers: torch.Tensor
    peaks: torch.Tensor
    totals: torch.Tensor
    used: torch.Tensor


@triton.jit
def _logsumexp(peaks, totals, head, g, parts, G: tl.constexpr, PARTS: tl.constexpr):
    """[GROUP] of all parts; 0 where there is no query head."""
    part = tl.arange(0, PARTS)
    place = (head * G + g[:, None]) * parts + part
    known = (g[:, None] < G) & (part < parts)
    part_peaks = tl.load(peaks + place, mask=known, other=-float("inf"))
    part_totals = tl.load(totals + place, mask=known, other=0.0)
    peak = tl.max(part_peaks, 1)
    # Where every cluster is empty there is no peak, and no score either.
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(part_totals * tl.exp(part_peaks - peak[:, None]), 1)
    return tl.where(g < G, peak + tl.log(tl.maximum(total, 1e-30)), 0.0)


@triton.jit
def _packed(logits, numbers, peaks, totals, head, c, stride, parts, least, threshold, G: tl.constexpr,
            GROUP: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    """Of some clusters of a head the rank of the score, and below it the size, in one integer.

    To keep what reaches a threshold, that has rank 1, and all else rank 0.
    """
    g = tl.arange(0, GROUP)
    size = tl.load(numbers + c, mask=c < stride, other=0)
    # Read before the sums are waited for.
    known = (c < stride)[:, None] & (g < G)
    logit = tl.load(logits + g * stride + c[:, None], mask=known, other=-float("inf"))
    score = tl.sum(tl.exp(logit - _logsumexp(peaks, totals, head, g, parts, G, PARTS)), 1)
    if KEEP:
        rank = (score / G >= threshold).to(tl.int32)
    else:
        rank = ((score / G).to(tl.int32, bitcast=True) >> (23 - SCORE)) - least
        rank = tl.minimum(tl.maximum(rank, 0), BINS * FINE - 1)
    return (rank.to(tl.uint32) << TOKENS) | size.to(tl.uint32)


@triton.jit
def _rank(packed):
    return (packed >> TOKENS).to(tl.int32)


@triton.jit
def _size(packed):
    return (packed & SIZE_MASK).to(tl.int32)


@triton.jit
def _sum_of_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _sum_of_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _by(place, size, number, SIZE: tl.constexpr, OPEN: tl.constexpr):
    """[SIZE] each: how much of sizes, and of numbers, is at each place."""
    there = place[:, None] == tl.arange(0, SIZE)[None, :]
    sizes = tl.sum(tl.where(there, size[:, None], 0), 0)
    numbers = sizes
    if OPEN:
        numbers = tl.sum(tl.where(there, number[:, None], 0), 0)
    return sizes, numbers


@triton.jit
def _load_counts(counts, head, others, SIZE: tl.constexpr, PARTS: tl.constexpr, OPEN: tl.constexpr):
    """[PARTS, SIZE] each: sizes and numbers that all parts of a head have counted."""
    part = tl.arange(0, PARTS)[:, None]
    place = counts + ((head * others + part) * 2) * SIZE + tl.arange(0, SIZE)[None, :]
    sizes = tl.load(place, mask=part < others, other=0)
    numbers = sizes
    if OPEN:
        numbers = tl.load(place + SIZE, mask=part < others, other=0)
    return sizes, numbers


@triton.jit
def _last(sizes, numbers, held, had, budget, wanted, SIZE: tl.constexpr, OPEN: tl.constexpr):
    """The last place that is taken of counts [PARTS, SIZE], and what all places above it hold and have, with what is
    above all of them: 0 where there is not enough."""
    place, of_all, of_numbers = tl.arange(0, SIZE), tl.sum(sizes, 0), tl.sum(numbers, 0)
    above, above_numbers = tl.sum(of_all, 0) - tl.cumsum(of_all, 0), tl.sum(of_numbers, 0) - tl.cumsum(of_numbers, 0)
    enough = held + above + of_all >= budget
    if OPEN:
        enough &= had + above_numbers + of_numbers >= wanted
    last = tl.max(tl.where(enough, place, 0), 0)
    held += tl.sum(tl.where(place == last, above, 0), 0)
    return last, held, had + tl.sum(tl.where(place == last, above_numbers, 0), 0)


@triton.jit
def _write_members(
    scratch, plane, number, rows, slots, order, taken, starts, begins, lengths,
    ENTRIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The rows of so many first members of a number of clusters, each cluster's from a slot on.

    Mostly few clusters are taken: these are brought together first, in order, and then read again by all threads.
    """
    tl.store(scratch + order, starts, mask=taken)
    tl.store(scratch + plane + order, begins, mask=taken)
    tl.store(scratch + 2 * plane + order, lengths, mask=taken)
    tl.debug_barrier()
    for at in range(0, number, ENTRIES):
        entry = at + tl.arange(0, ENTRIES)
        known = entry < number
        of_starts = tl.load(scratch + entry, mask=known, other=0)[:, None]
        of_begins = tl.load(scratch + plane + entry, mask=known, other=0)[:, None]
        of_lengths = tl.load(scratch + 2 * plane + entry, mask=known, other=0)
        for first in range(0, tl.max(of_lengths, 0), WIDTH):
            member = first + tl.arange(0, WIDTH)[None, :]
            inside = (member < of_lengths[:, None]) & (of_begins + member < slots)
            tl.store(rows + of_begins + member, of_starts + member, mask=inside)


@triton.jit
def _take(
    rank, size, number, starts, last, held, had, above, equal, equal_size, budget, wanted,
    lengths, log_left, rows, slots, scratch, plane, used, seen, at, head, c, stride,
    ENTRIES: tl.constexpr, WIDTH: tl.constexpr, OPEN: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Write what is taken of some clusters: all above the last rank, then of that rank until there is enough.

    `held` and `had` are the tokens and members of all clusters above the last rank, `above`, `equal` and `equal_size`
    members above it, members of it and their tokens in the clusters before these.
    """
    above_number, equal_number = tl.where(rank > last, number, 0), tl.where(rank == last, number, 0)
    above_one, equal_one = (above_number > 0).to(tl.int32), (equal_number > 0).to(tl.int32)
    above_ends, equal_ends, above_order, equal_order = tl.associative_scan(
        (above_number, equal_number, above_one, equal_one), 0, _sum_of_four
    )
    equal_begins = equal + equal_ends - equal_number
    if OPEN:
        sizes = tl.where(rank == last, size, 0)
        held_before = held + equal_size + tl.cumsum(sizes, 0) - sizes
        opened = (rank == last) & ((held_before < budget) | (had + equal_begins < wanted))
        taken = above_number + tl.where(opened, number, 0)
        left = tl.where(opened | (rank > last), 0, size)
    else:
        taken = above_number + tl.minimum(tl.maximum(budget - held - equal_begins, 0), equal_number)
        left = size - taken
    tl.store(lengths + at + c, taken, mask=c < stride)
    log_of_left = tl.where(left > 0, tl.log(tl.maximum(left, 1).to(tl.float32)), -float("inf"))
    tl.store(log_left + at + c, log_of_left, mask=c < stride)
    clusters_above, clusters, count = tl.reduce((above_one, (taken > 0).to(tl.int32), taken), 0, _sum_of_three)
    slot = tl.where(rank > last, above + above_ends - above_number, had + equal_begins)
    order = tl.where(rank > last, above_order, clusters_above + equal_order) - 1
    _write_members(scratch, plane, clusters, rows, slots, order, taken > 0, starts, slot, taken, ENTRIES, WIDTH)
    if count > 0:
        tl.atomic_add(used + head, count, sem="relaxed")
        if SEEN:
            tl.atomic_add(seen + head, count.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["least"])
def _rank_kernel(
    logits, numbers, children, peaks, totals, ranked, coarse, stride, clusters, parts, least, threshold,
    G: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr,
    OPEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Ranks of a part's clusters, and their tokens and children counted by the exponent."""
    start(EARLY)
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = part * PART + tl.arange(0, PART)
    packed = _packed(
        logits + head * G * stride, numbers + head * stride, peaks, totals, head, c, stride, parts, least, threshold,
        G, GROUP, PART, PARTS, KEEP,
    )  # fmt: skip
    tl.store(ranked + head * stride + c, packed.to(tl.int32, bitcast=True), mask=c < stride)
    size, number = _size(packed), _size(packed)
    if OPEN:
        number = tl.load(children + head * clusters + c, mask=c < clusters, other=0)
    sizes, of_numbers = _by(_rank(packed) if KEEP else _rank(packed) >> SCORE, size, number, BINS, OPEN)
    place = coarse + ((head * tl.num_programs(0) + part) * 2) * BINS + tl.arange(0, BINS)
    tl.store(place, sizes)
    if OPEN:
        tl.store(place + BINS, of_numbers)


@triton.jit(do_not_specialize=["budget", "wanted"])
def _count_kernel(
    ranked, children, coarse, fine, limits, stride, clusters, budget, wanted,
    PART: tl.constexpr, OTHERS: tl.constexpr, OPEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A part's tokens and children, of clusters with the last one's exponent, counted by the rest of the rank."""
    start(EARLY)
    part, others, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    c, place = part * PART + tl.arange(0, PART), fine + ((head * others + part) * 2) * FINE
    tl.store(place + tl.arange(0, 2 * FINE), tl.zeros([2 * FINE], tl.int32))
    packed = tl.load(ranked + head * stride + c, mask=c < stride, other=0).to(tl.uint32, bitcast=True)
    sizes, numbers = _load_counts(coarse, head, others, BINS, OTHERS, OPEN)
    last, held, had = _last(sizes, numbers, 0, 0, budget, wanted, BINS, OPEN)
    before = (tl.arange(0, OTHERS)[:, None] < part) & (tl.arange(0, BINS)[None, :] > last)
    limits += (head * others + part) * 4
    tl.store(limits, last)
    tl.store(limits + 1, held)
    tl.store(limits + 2, had)
    tl.store(limits + 3, tl.sum(tl.sum(tl.where(before, numbers, 0), 0), 0))
    size, rank = _size(packed), _rank(packed)
    alike, place = rank >> SCORE == last, place + (rank & (FINE - 1))
    tl.debug_barrier()
    tl.atomic_add(place, size, mask=alike & (size > 0), sem="relaxed")
    if OPEN:
        number = tl.load(children + head * clusters + c, mask=alike & (c < clusters), other=0)
        tl.atomic_add(place + FINE, number, mask=number > 0, sem="relaxed")


@triton.jit(do_not_specialize=["budget", "wanted"])
def _take_kernel(
    ranked, children, coarse, fine, limits, starts, lengths, log_left, rows, scratch, used, seen,
    stride, clusters, starts_stride, rows_stride, slots, plane, budget, wanted, PART: tl.constexpr,
    OTHERS: tl.constexpr, KEEP: tl.constexpr, OPEN: tl.constexpr, SEEN: tl.constexpr, ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What a part takes, after those before it."""
    start(EARLY)
    part, others, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    at, c, before = head * stride, part * PART + tl.arange(0, PART), tl.arange(0, OTHERS)[:, None] < part
    packed = tl.load(ranked + at + c, mask=c < stride, other=0).to(tl.uint32, bitcast=True)
    first_row = tl.load(starts + head * starts_stride + c, mask=c < clusters, other=0).to(tl.int32)
    size, rank = _size(packed), _rank(packed)
    number = size
    if OPEN:
        number = tl.load(children + head * clusters + c, mask=c < clusters, other=0)
    last, held, had, equal, equal_size = 0, 0, 0, 0, 0
    if KEEP:
        _, numbers = _load_counts(coarse, head, others, BINS, OTHERS, OPEN)
        kept = before & (tl.arange(0, BINS)[None, :] > 0)
        above = tl.sum(tl.sum(tl.where(kept, numbers, 0), 0), 0)
    else:
        limits += (head * others + part) * 4
        high, held = tl.load(limits), tl.load(limits + 1)
        had, above = tl.load(limits + 2), tl.load(limits + 3)
        sizes, numbers = _load_counts(fine, head, others, FINE, OTHERS, OPEN)
        low, held, had = _last(sizes, numbers, held, had, budget, wanted, FINE, OPEN)
        last, place = (high << SCORE) + low, tl.arange(0, FINE)
        numbers = tl.sum(tl.where(before, numbers, 0), 0)
        above += tl.sum(tl.where(place > low, numbers, 0), 0)
        equal = tl.sum(tl.where(place == low, numbers, 0), 0)
        if OPEN:
            sizes = tl.sum(tl.where(before, sizes, 0), 0)
            equal_size = tl.sum(tl.where(place == low, sizes, 0), 0)
    _take(
        rank, size, number, first_row, last, held, had, above, equal, equal_size, budget, wanted,
        lengths, log_left, rows + head * rows_stride, slots, scratch + at + part * PART, plane, used, seen, at, head, c,
        stride, ENTRIES, WIDTH, OPEN, SEEN,
    )  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """What to take: clusters for a budget of tokens or, with a threshold, all that reach it; or, to be opened, clusters
    until they hold the budget and have `wanted` children too, `children` [H, C] int32 of each.

    starts [H, C] int: the first member of each, a token's row or a child; slots: members of a head at most; seen [H]
    int64 or None: to which their number is added.
    """

    starts: torch.Tensor
    slots: int
    budget: int
    threshold: float | None = None
    children: torch.Tensor | None = None
    wanted: int = 0
    seen: torch.Tensor | None = None


def choose(scored: Scored, clusters: int, take: Wanted) -> ClusterChoice:
    """What is taken of so many clusters, from their logits."""
    (H, G, stride), parts, device = scored.logits.shape, scored.peaks.shape[2], scored.logits.device
    size = min(max(power_of_two(triton.cdiv(H * stride, 2 * multiprocessors(device))), FEWEST), MOST)
    size = max(size, power_of_two(triton.cdiv(stride, MOST_PARTS)))
    grid, others = (triton.cdiv(stride, size), H), power_of_two(triton.cdiv(stride, size))
    keep, opened, early = take.threshold is not None, take.children is not None, following(device)
    children = scored.numbers if take.children is None else take.children.contiguous()
    ranked, lengths, *scratch = torch.empty(5, H, stride, dtype=torch.int32, device=device)
    log_left = torch.empty(H, stride, device=device)
    coarse = torch.empty(H, grid[0], 2, BINS.value, dtype=torch.int32, device=device)
    fine = torch.empty(H, grid[0], 2, FINE.value, dtype=torch.int32, device=device)
    limits = torch.empty(H, grid[0], 4, dtype=torch.int32, device=device)
    rows = torch.empty(H, aligned(max(take.slots, 1)), dtype=torch.int32, device=device)
    how = {"PART": size, "OPEN": opened, "num_warps": min(32, max(4, size // CLUSTERS_A_WARP)), **early}
    _rank_kernel[grid](
        scored.logits, scored.numbers, children, scored.peaks, scored.totals, ranked, coarse,
        stride, children.shape[1], parts, least_rank(take.budget), take.threshold or 0.0,
        G=G, GROUP=power_of_two(G), PARTS=power_of_two(parts), KEEP=keep, **how,
    )  # fmt: skip
    if not keep:
        _count_kernel[grid](
            ranked, children, coarse, fine, limits, stride, children.shape[1], take.budget, take.wanted,
            OTHERS=others, **how,
        )  # fmt: skip
    _take_kernel[grid](
        ranked, children, coarse, fine, limits, take.starts, lengths, log_left, rows, scratch[0], scored.used,
        scored.used if take.seen is None else take.seen, stride, clusters, take.starts.stride(0), rows.shape[1],
        take.slots, scratch[0].numel(), take.budget, take.wanted,
        OTHERS=others, KEEP=keep, SEEN=take.seen is not None, ENTRIES=ENTRIES, WIDTH=WIDTH, **how,
    )  # fmt: skip
    return ClusterChoice(scored.logits, lengths[:, :clusters], log_left, rows, scored.used)
