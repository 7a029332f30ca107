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

from sparsekv.kernels.cluster_choice import EXPONENT_BITS, SCORE_BITS, TOKEN_BITS, ClusterChoice, Family, least_rank
from sparsekv.kernels.launch import following, multiprocessors
from sparsekv.kernels.tiles_triton import power_of_two, start

FEWEST, MOST = 256, 2048  # clusters of a program, where several choose for a head
MOST_ALONE, HEADS = 8192, 8  # one program chooses of no more, for as many heads as this share of the multiprocessors
CLUSTERS_A_WARP, ALONE_A_WARP, PASSED = 128, 512, 4096
RANKS_OF_A_HEAD = 2 ** (EXPONENT_BITS + SCORE_BITS)
SCORE, TOKENS, RANKS, SIZE_MASK, DIGITS = (
    tl.constexpr(number)
    for number in (SCORE_BITS, TOKEN_BITS, RANKS_OF_A_HEAD, 2**TOKEN_BITS - 1, (EXPONENT_BITS + SCORE_BITS + 1) // 2)
)


@dataclass(frozen=True)
class Scored:
    """Clusters that were looked up: logits [H, G, stride], minus infinity where there are no tokens; their numbers of
    tokens [H, stride] int32; of parts of them peaks and totals [H, G, parts] of the softmax; and [H, ranks] int32
    zeros, to count in."""

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
def _packed(logits, sizes, peaks, totals, head, c, stride, sizes_stop, parts, least, threshold, G: tl.constexpr,
            GROUP: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    """Of some clusters of a head the rank of the score, and below it the size, in one integer.

    To keep what reaches a threshold, that has rank 1, and all else rank 0.
    """
    g = tl.arange(0, GROUP)
    size = tl.load(sizes + c, mask=c < sizes_stop, other=0)
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
def _sum_of_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _take(packed, last, room, above_before, equal_before, numbers, first_child, first_row, lengths, ends, log_left,
          c, stride, FAMILY: tl.constexpr):  # fmt: skip
    """Write what is taken of some clusters, after those before them."""
    size, rank, inside = _size(packed), _rank(packed), c < stride
    above, equal = tl.where(rank > last, size, 0), tl.where(rank == last, size, 0)
    above_ends, equal_ends = tl.associative_scan((above, equal), 0, _sum_of_two)
    equal_ends += equal_before
    taken = above + tl.minimum(equal_ends, room) - tl.minimum(equal_ends - equal, room)
    tl.store(lengths + c, taken, mask=inside)
    tl.store(ends + c, above_before + above_ends + tl.minimum(equal_ends, room), mask=inside)
    left = size - taken
    if FAMILY:
        number = tl.load(numbers + c, mask=inside, other=0)
        in_part = inside & (taken > 0) & (taken < size)
        child = tl.load(first_child + c, mask=in_part, other=0)
        begin = tl.load(first_row + child, mask=in_part, other=0)
        end = tl.load(first_row + child + taken, mask=in_part, other=0)
        left = tl.where(in_part, number - (end - begin), tl.where(taken > 0, 0, number))
    log_of_left = tl.where(left > 0, tl.log(tl.maximum(left, 1).to(tl.float32)), -float("inf"))
    tl.store(log_left + c, log_of_left, mask=inside)


@triton.jit(do_not_specialize=["budget", "least"])
def _choose_kernel(
    logits, numbers, sizes, peaks, totals, first_child, first_row, lengths, ends, log_left, stride, sizes_stride,
    sizes_stop, children_stride, rows_stride, parts, budget, least, G: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, FAMILY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program a head, which keeps all its clusters."""
    start(EARLY)
    head, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at = head * stride
    packed = _packed(
        logits + at * G, sizes + head * sizes_stride, peaks, totals, head, c, stride, sizes_stop, parts, least,
        0.0, G, GROUP, BLOCK, PARTS, False,
    )  # fmt: skip
    # The largest rank that enough tokens reach: 0 where all of them together are too few.
    last, above, rank, size = 0, 0, _rank(packed), _size(packed)
    for digit in tl.static_range(DIGITS - 1, -1, -1):
        low, mid, top = last + (1 << (2 * digit)), last + (2 << (2 * digit)), last + (3 << (2 * digit))
        tokens = tl.where(rank >= low, size, 0), tl.where(rank >= mid, size, 0), tl.where(rank >= top, size, 0)
        from_low, from_mid, from_top = tl.reduce(tokens, 0, _sum_of_three)
        reached = (from_low >= budget).to(tl.int32) + (from_mid >= budget).to(tl.int32)
        # What is past the last rank no cluster has, which of a budget of nothing is enough.
        reached += (from_top >= budget).to(tl.int32)
        last += reached << (2 * digit)
        passed = tl.where(reached == 1, from_mid, tl.where(reached == 2, from_top, above))
        above = tl.where(reached == 0, from_low, passed)
    room = budget - above
    _take(
        packed, last, room, 0, 0, numbers + at, first_child + head * children_stride, first_row + head * rows_stride,
        lengths + at, ends + at, log_left + at, c, stride, FAMILY,
    )  # fmt: skip


@triton.jit(do_not_specialize=["least"])
def _rank_kernel(
    logits, sizes, peaks, totals, ranked, counted, stride, sizes_stride, sizes_stop, parts, least, threshold,
    G: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Ranks of a part's clusters, and their tokens counted by rank."""
    start(EARLY)
    head, c = tl.program_id(1).to(tl.int64), tl.program_id(0) * PART + tl.arange(0, PART)
    packed = _packed(
        logits + head * G * stride, sizes + head * sizes_stride, peaks, totals, head, c, stride, sizes_stop, parts,
        least, threshold, G, GROUP, PART, PARTS, KEEP,
    )  # fmt: skip
    rank, size = _rank(packed), _size(packed)
    if not KEEP:
        # Nothing is below the first rank, so that nobody asks how much has it: most clusters, at one address.
        tl.atomic_add(counted + head * RANKS + rank, size, mask=(rank > 0) & (size > 0), sem="relaxed")
    tl.store(ranked + head * stride + c, packed.to(tl.int32, bitcast=True), mask=c < stride)


@triton.jit(do_not_specialize=["budget"])
def _take_kernel(
    ranked, counted, numbers, first_child, first_row, lengths, ends, log_left, stride, children_stride, rows_stride,
    budget, PART: tl.constexpr, PASSED: tl.constexpr, FAMILY: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What a part takes, after those before it."""
    start(EARLY)
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at, last, room = head * stride, 0, 0
    if not KEEP:
        rank = tl.arange(0, RANKS)
        tokens = tl.load(counted + head * RANKS + rank)
        reaching = tl.sum(tokens, 0) - tl.cumsum(tokens, 0) + tokens
        # The largest rank that enough tokens reach: 0 where those above it are too few.
        last = tl.max(tl.where(reaching >= budget, rank, 0), 0)
        room = budget - tl.sum(tl.where(rank > last, tokens, 0), 0)
    above, equal = tl.zeros([PASSED], tl.int32), tl.zeros([PASSED], tl.int32)
    for first in range(0, part * PART, PASSED):
        c = first + tl.arange(0, PASSED)
        passed = tl.load(ranked + at + c, mask=c < part * PART, other=0).to(tl.uint32, bitcast=True)
        above += tl.where(_rank(passed) > last, _size(passed), 0)
        equal += tl.where(_rank(passed) == last, _size(passed), 0)
    c = part * PART + tl.arange(0, PART)
    packed = tl.load(ranked + at + c, mask=c < stride, other=0).to(tl.uint32, bitcast=True)
    _take(
        packed, last, room, tl.sum(above, 0), tl.sum(equal, 0), numbers + at, first_child + head * children_stride,
        first_row + head * rows_stride, lengths + at, ends + at, log_left + at, c, stride, FAMILY,
    )  # fmt: skip


def choose(
    scored: Scored, clusters: int, budget: int, family: Family | None = None, threshold: float | None = None
) -> ClusterChoice:
    """`choose_clusters` from the logits of so many clusters, or, with a threshold, `keep_clusters`."""
    (H, G, stride), parts, device = scored.logits.shape, scored.peaks.shape[2], scored.logits.device
    ranked, lengths, ends = torch.empty(3, H, stride, dtype=torch.int32, device=device)
    log_left = torch.empty(H, stride, device=device)
    sizes, first_child, first_row = scored.numbers, lengths, lengths
    if family is not None:
        sizes, first_child, first_row = family.children, family.first_child, family.first_row
    below = scored.numbers, first_child, first_row, lengths, ends, log_left
    strides, sums = (first_child.stride(0), first_row.stride(0)), (scored.peaks, scored.totals)
    looked, early = (stride, sizes.stride(0), sizes.shape[1]), following(device)
    shape = {"G": G, "GROUP": power_of_two(G), "PARTS": power_of_two(parts)}
    keep = threshold is not None
    if not keep and stride <= MOST_ALONE and multiprocessors(device) <= HEADS * H:
        block = max(power_of_two(stride), 128)
        _choose_kernel[(H,)](
            scored.logits, scored.numbers, sizes, *sums, *below[1:], *looked, *strides, parts, budget,
            least_rank(budget), BLOCK=block, FAMILY=family is not None, num_warps=max(4, block // ALONE_A_WARP),
            **shape, **early,
        )  # fmt: skip
        return ClusterChoice(scored.logits, lengths[:, :clusters], ends[:, :clusters], log_left)
    size = min(max(power_of_two(triton.cdiv(H * stride, 2 * multiprocessors(device))), FEWEST), MOST)
    grid, warps = (triton.cdiv(stride, size), H), max(4, size // CLUSTERS_A_WARP)
    _rank_kernel[grid](
        scored.logits, sizes, *sums, ranked, scored.counted, *looked, parts, least_rank(budget), threshold or 0.0,
        PART=size, KEEP=keep, num_warps=warps, **shape, **early,
    )  # fmt: skip
    _take_kernel[grid](
        ranked, scored.counted, *below, stride, *strides, budget, PART=size, PASSED=PASSED, FAMILY=family is not None,
        KEEP=keep, num_warps=warps, **early,
    )  # fmt: skip
    return ClusterChoice(scored.logits, lengths[:, :clusters], ends[:, :clusters], log_left)
