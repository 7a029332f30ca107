"""The best clusters to a budget, from their logits, in Triton.

A choice to a budget needs no sort: what is looked for is the rank of the last cluster that is taken, the leading bits
of its score. Where there are many heads one program finds each one's, two bits at a time. Of few heads' clusters all
programs count the tokens of each rank, in integers, so that no order of theirs changes the sums; then each knows that
rank, and what clusters before its own take.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparsekv.kernels.cluster_choice import EXPONENT_BITS, SCORE_BITS, TOKEN_BITS, ClusterChoice, least_rank
from sparsekv.kernels.launch import following, multiprocessors
from sparsekv.kernels.tiles_triton import power_of_two, start

FEWEST, MOST = 256, 2048  # clusters of a program, where several choose for a head
MOST_ALONE, HEADS = 8192, 8  # one program chooses of no more, for as many heads as this share of the multiprocessors
CLUSTERS_A_WARP, ALONE_A_WARP, PASSED = 128, 512, 4096
RANKS_OF_A_HEAD = 2 ** (EXPONENT_BITS + SCORE_BITS)
SCORE, TOKENS, RANKS, SIZE_MASK = (
    tl.constexpr(number) for number in (SCORE_BITS, TOKEN_BITS, RANKS_OF_A_HEAD, 2**TOKEN_BITS - 1)
)
DIGITS = tl.constexpr((EXPONENT_BITS + SCORE_BITS + 1) // 2)  # of two bits


@dataclass(frozen=True)
class Scored:
    """Clusters that were looked up: logits [H, G, stride], minus infinity where there are no tokens; their numbers of
    tokens [H, stride] int32; of parts of them peaks and totals [H, G, parts] of the softmax; and [H, 2, ranks]
    int32 zeros, to count in."""

    logits: torch.Tensor
    numbers: torch.Tensor
    peaks: torch.Tensor
    totals: torch.Tensor
    counted: torch.Tensor


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
    logsumexp = _logsumexp(peaks, totals, head, g, parts, G, PARTS)
    score = tl.zeros([BLOCK], tl.float32)
    for one in tl.static_range(G):
        logit = tl.load(logits + one * stride + c, mask=c < stride, other=-float("inf"))
        score += tl.exp(logit - tl.sum(tl.where(g == one, logsumexp, 0.0), 0))
    if KEEP:
        rank = (score / G >= threshold).to(tl.int32)
    else:
        rank = ((score / G).to(tl.int32, bitcast=True) >> (23 - SCORE)) - least
        rank = tl.minimum(tl.maximum(rank, 0), RANKS - 1)
    return (rank.to(tl.uint32) << TOKENS) | size.to(tl.uint32)


@triton.jit
def _rank(packed):
    return (packed >> TOKENS).to(tl.int32)


@triton.jit
def _size(packed):
    return (packed & SIZE_MASK).to(tl.int32)


@triton.jit
def _sum_of_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sum_of_each(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _reached(rank, size, wanted):
    """The largest rank that clusters of so much size in all reach, 0 where all are too few, and the size above it."""
    last, above = 0, 0
    for digit in tl.static_range(DIGITS - 1, -1, -1):
        low, mid, top = last + (1 << (2 * digit)), last + (2 << (2 * digit)), last + (3 << (2 * digit))
        sizes = tl.where(rank >= low, size, 0), tl.where(rank >= mid, size, 0), tl.where(rank >= top, size, 0)
        from_low, from_mid, from_top = tl.reduce(sizes, 0, _sum_of_each)
        reached = (from_low >= wanted).to(tl.int32) + (from_mid >= wanted).to(tl.int32)
        # What is past the last rank no cluster has, which of nothing wanted is enough.
        reached += (from_top >= wanted).to(tl.int32)
        last += reached << (2 * digit)
        passed = tl.where(reached == 1, from_mid, tl.where(reached == 2, from_top, above))
        above = tl.where(reached == 0, from_low, passed)
    return last, above


@triton.jit
def _take(packed, last, room, above_before, equal_before, lengths, ends, log_left, c, stride):
    """Write what is taken of some clusters, after those before them."""
    size, rank, inside = _size(packed), _rank(packed), c < stride
    above, equal = tl.where(rank > last, size, 0), tl.where(rank == last, size, 0)
    above_ends, equal_ends = tl.associative_scan((above, equal), 0, _sum_of_two)
    equal_ends += equal_before
    taken = above + tl.minimum(equal_ends, room) - tl.minimum(equal_ends - equal, room)
    tl.store(lengths + c, taken, mask=inside)
    tl.store(ends + c, above_before + above_ends + tl.minimum(equal_ends, room), mask=inside)
    left = size - taken
    log_of_left = tl.where(left > 0, tl.log(tl.maximum(left, 1).to(tl.float32)), -float("inf"))
    tl.store(log_left + c, log_of_left, mask=inside)


@triton.jit(do_not_specialize=["budget", "least"])
def _choose_kernel(
    logits, numbers, peaks, totals, lengths, ends, log_left, stride, parts, budget, least,
    G: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program a head, which keeps all its clusters."""
    start(EARLY)
    head, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at = head * stride
    packed = _packed(
        logits + at * G, numbers + at, peaks, totals, head, c, stride, parts, least, 0.0, G, GROUP, BLOCK, PARTS, False
    )
    last, above = _reached(_rank(packed), _size(packed), budget)
    room = budget - above
    _take(packed, last, room, 0, 0, lengths + at, ends + at, log_left + at, c, stride)


@triton.jit(do_not_specialize=["wanted", "budget", "least"])
def _open_kernel(
    logits, numbers, children, peaks, totals, ranked, counted, lengths, ends, log_left,
    stride, clusters, parts, wanted, budget, least, G: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, COUNTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program a head: whole clusters until two sums are reached."""
    start(EARLY)
    head, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at = head * stride
    number = tl.load(children + head * clusters + c, mask=c < clusters, other=0)
    if COUNTED:
        packed = tl.load(ranked + at + c, mask=c < stride, other=0).to(tl.uint32, bitcast=True)
        counted += head * 2 * RANKS
        enough = (_reaching(counted) >= budget) & (_reaching(counted + RANKS) >= wanted)
        last = tl.max(tl.where(enough, tl.arange(0, RANKS), 0), 0)
        rank, size = _rank(packed), _size(packed)
    else:
        packed = _packed(
            logits + at * G, numbers + at, peaks, totals, head, c, stride, parts, least, 0.0,
            G, GROUP, BLOCK, PARTS, False,
        )  # fmt: skip
        rank, size = _rank(packed), _size(packed)
        last, _ = _reached(rank, number, wanted)
        if tl.sum(tl.where(rank >= last, size, 0), 0) < budget:
            last, _ = _reached(rank, size, budget)
    above, equal = rank > last, rank == last
    held, had = tl.reduce((tl.where(above, size, 0), tl.where(above, number, 0)), 0, _sum_of_two)
    above_ends, had_ends, held_ends = tl.associative_scan(
        (tl.where(above, number, 0), tl.where(equal, number, 0), tl.where(equal, size, 0)), 0, _sum_of_each
    )
    opened = equal & ((held + held_ends - size < budget) | (had + had_ends - number < wanted))
    most = tl.max(tl.where(opened, had_ends, 0), 0)
    opened |= above
    tl.store(lengths + at + c, tl.where(opened, number, 0), mask=c < stride)
    tl.store(ends + at + c, above_ends + tl.minimum(had_ends, most), mask=c < stride)
    left = tl.where(opened | (size == 0), -float("inf"), tl.log(tl.maximum(size, 1).to(tl.float32)))
    tl.store(log_left + at + c, left, mask=c < stride)


@triton.jit(do_not_specialize=["least"])
def _rank_kernel(
    logits, numbers, children, peaks, totals, ranked, counted, stride, clusters, parts, least, threshold,
    G: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr,
    OPEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Ranks of a part's clusters, and their tokens counted by rank, and to open some their children too."""
    start(EARLY)
    head, c = tl.program_id(1).to(tl.int64), tl.program_id(0) * PART + tl.arange(0, PART)
    packed = _packed(
        logits + head * G * stride, numbers + head * stride, peaks, totals, head, c, stride, parts, least, threshold,
        G, GROUP, PART, PARTS, KEEP,
    )  # fmt: skip
    rank, size = _rank(packed), _size(packed)
    if not KEEP:
        # Nothing is below the first rank, so that nobody asks how much has it: most clusters, at one address.
        tl.atomic_add(counted + head * 2 * RANKS + rank, size, mask=(rank > 0) & (size > 0), sem="relaxed")
    if OPEN:
        number = tl.load(children + head * clusters + c, mask=c < clusters, other=0)
        place = counted + (head * 2 + 1) * RANKS + rank
        tl.atomic_add(place, number, mask=(rank > 0) & (number > 0), sem="relaxed")
    tl.store(ranked + head * stride + c, packed.to(tl.int32, bitcast=True), mask=c < stride)


@triton.jit
def _reaching(counted):
    """[RANKS]: how much has a rank or a higher one, of what was counted by rank."""
    sizes = tl.load(counted + tl.arange(0, RANKS))
    return tl.sum(sizes, 0) - tl.cumsum(sizes, 0) + sizes


@triton.jit(do_not_specialize=["budget"])
def _take_kernel(
    ranked, counted, lengths, ends, log_left, stride, budget,
    PART: tl.constexpr, PASSED: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What a part takes, after those before it."""
    start(EARLY)
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at, last, room = head * stride, 0, 0
    if not KEEP:
        rank, reaching = tl.arange(0, RANKS), _reaching(counted + head * 2 * RANKS)
        # The largest rank that enough tokens reach: 0 where those above it are too few.
        last = tl.max(tl.where(reaching >= budget, rank, 0), 0)
        room = budget - tl.sum(tl.where(rank == last + 1, reaching, 0), 0)
    above, equal = tl.zeros([PASSED], tl.int32), tl.zeros([PASSED], tl.int32)
    for first in range(0, part * PART, PASSED):
        c = first + tl.arange(0, PASSED)
        passed = tl.load(ranked + at + c, mask=c < part * PART, other=0).to(tl.uint32, bitcast=True)
        above += tl.where(_rank(passed) > last, _size(passed), 0)
        equal += tl.where(_rank(passed) == last, _size(passed), 0)
    c = part * PART + tl.arange(0, PART)
    packed = tl.load(ranked + at + c, mask=c < stride, other=0).to(tl.uint32, bitcast=True)
    _take(packed, last, room, tl.sum(above, 0), tl.sum(equal, 0), lengths + at, ends + at, log_left + at, c, stride)


def choose(scored: Scored, clusters: int, budget: int, threshold: float | None = None) -> ClusterChoice:
    """`choose_clusters` from the logits of so many clusters, or, with a threshold, `keep_clusters`."""
    (H, G, stride), parts, device = scored.logits.shape, scored.peaks.shape[2], scored.logits.device
    keep, taken, early = threshold is not None, _room(scored), following(device)
    sums, shape = (scored.peaks, scored.totals), {"G": G, "GROUP": power_of_two(G), "PARTS": power_of_two(parts)}
    if not keep and stride <= MOST_ALONE and multiprocessors(device) <= HEADS * H:
        block = max(power_of_two(stride), 128)
        _choose_kernel[(H,)](
            scored.logits, scored.numbers, *sums, *taken, stride, parts, budget, least_rank(budget),
            BLOCK=block, num_warps=max(4, block // ALONE_A_WARP), **shape, **early,
        )  # fmt: skip
        return _chosen(scored, clusters, taken)
    ranked, size = _ranked(scored, least_rank(budget), threshold=threshold)
    grid, warps = (triton.cdiv(stride, size), H), max(4, size // CLUSTERS_A_WARP)
    _take_kernel[grid](
        ranked, scored.counted, *taken, stride, budget, PART=size, PASSED=PASSED, KEEP=keep, num_warps=warps, **early
    )
    return _chosen(scored, clusters, taken)


def open_best(scored: Scored, children: torch.Tensor, wanted: int, budget: int) -> ClusterChoice:
    """`open_clusters` from the logits: of a coarse level one program a head keeps all clusters."""
    (H, G, stride), parts, device = scored.logits.shape, scored.peaks.shape[2], scored.logits.device
    taken, children, block = _room(scored), children.contiguous(), max(power_of_two(stride), 128)
    counted, ranked = multiprocessors(device) > HEADS * H, scored.numbers
    if counted:
        ranked, _ = _ranked(scored, least_rank(budget), children)
    _open_kernel[(H,)](
        scored.logits, scored.numbers, children, scored.peaks, scored.totals, ranked, scored.counted, *taken,
        stride, children.shape[1], parts, wanted, budget, least_rank(budget), G=G, GROUP=power_of_two(G), BLOCK=block,
        PARTS=power_of_two(parts), COUNTED=counted, num_warps=min(32, max(4, block // ALONE_A_WARP)),
        **following(device),
    )  # fmt: skip
    return _chosen(scored, children.shape[1], taken)


def _ranked(
    scored: Scored, least: int, children: torch.Tensor | None = None, threshold: float | None = None
) -> tuple[torch.Tensor, int]:
    """Ranks by several programs a head, [H, stride], which have counted by rank too, and how many clusters each had."""
    (H, G, stride), parts, device = scored.logits.shape, scored.peaks.shape[2], scored.logits.device
    ranked = torch.empty(H, stride, dtype=torch.int32, device=device)
    size = min(max(power_of_two(triton.cdiv(H * stride, 2 * multiprocessors(device))), FEWEST), MOST)
    _rank_kernel[(triton.cdiv(stride, size), H)](
        scored.logits, scored.numbers, scored.numbers if children is None else children, scored.peaks, scored.totals,
        ranked, scored.counted, stride, 0 if children is None else children.shape[1], parts, least, threshold or 0.0,
        G=G, GROUP=power_of_two(G), PART=size, PARTS=power_of_two(parts), KEEP=threshold is not None,
        OPEN=children is not None, num_warps=max(4, size // CLUSTERS_A_WARP), **following(device),
    )  # fmt: skip
    return ranked, size


def _room(scored: Scored) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For lengths, ends and the logarithms of what is left."""
    lengths, ends = torch.empty_like(scored.numbers), torch.empty_like(scored.numbers)
    return lengths, ends, torch.empty_like(lengths, dtype=torch.float32)


def _chosen(scored: Scored, clusters: int, taken: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> ClusterChoice:
    lengths, ends, log_left = taken
    return ClusterChoice(scored.logits, lengths[:, :clusters], ends[:, :clusters], log_left)
