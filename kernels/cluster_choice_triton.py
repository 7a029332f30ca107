"""`choose_clusters` in Triton: logits and their sums over all multiprocessors, then one program a head that chooses.

A choice to a budget needs no sort: the score of the last cluster that is taken is found by bisection on the leading
bits of a float, which are ordered as the floats are where none is negative.
"""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.cluster_choice import EXPONENT_BITS, SCORE_BITS, ClusterChoice, least_rank
from sparsekv.kernels.launch import following, multiprocessors, programs_per_head
from sparsekv.kernels.tiles_triton import aligned, capped, dot, group_rows, power_of_two, share, start, tile_rows

PROGRAMS_PER_MULTIPROCESSOR = 8
TILE_BYTES, WARPS, STAGES = 16_384, 4, 2
CLUSTERS_A_WARP = 512


@triton.jit
def _logits_kernel(
    query, centroids, counts, logits, numbers, peaks, totals,
    C, stride, softmax_scale, softcap, CAPPED: tl.constexpr,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Logits of a program's share of a head's centroids, their largest, and the sum of counts times exponents."""
    start(EARLY)
    part, parts, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    g, d, t = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    of_group = g < G
    q = tl.load(query + (head * G + g[:, None]) * D + d, mask=of_group[:, None] & (d < D), other=0.0)
    centroids, counts, logits = centroids + head * C * D, counts + head * C, logits + head * G * stride
    peak = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    # Past the last cluster come some of no token, up to the end of a row.
    first, stop = share(part, parts, stride // 16)
    first, stop = tl.multiple_of(first * 16, 16), tl.multiple_of(stop * 16, 16)
    for at in tl.range(first, stop, TILE, num_stages=STAGES):
        c = at + t
        inside = c < stop
        k = tl.load(centroids + c[:, None] * D + d, mask=(c < C)[:, None] & inside[:, None] & (d < D), other=0.0)
        number = tl.load(counts + c, mask=inside & (c < C), other=0).to(tl.int32)
        tl.store(numbers + head * stride + c, number, mask=inside)
        scores = capped(dot(q, tl.trans(k)) * softmax_scale, softcap, CAPPED)
        scores = tl.where(number > 0, scores, -float("inf"))
        tl.store(logits + g[:, None] * stride + c, scores, mask=of_group[:, None] & inside)
        highest = tl.maximum(peak, tl.max(scores, 1))
        # There may be no cluster yet that has a token.
        safe = tl.where(highest == -float("inf"), 0.0, highest)
        total = total * tl.exp(peak - safe) + tl.sum(tl.exp(scores - safe[:, None]) * number.to(tl.float32), 1)
        peak = highest
    place = (head * G + g) * parts + part
    tl.store(peaks + place, peak, mask=of_group)
    tl.store(totals + place, total, mask=of_group)


@triton.jit
def _sum_of_two(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["budget", "least"])
def _choose_kernel(
    logits, numbers, peaks, totals, lengths, ends, log_left,
    stride, parts, budget, least, G: tl.constexpr, GROUP: tl.constexpr, BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr, SCORE_BITS: tl.constexpr, EXPONENT_BITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start(EARLY)
    head = tl.program_id(0).to(tl.int64)
    g, c, part = tl.arange(0, GROUP), tl.arange(0, BLOCK_C), tl.arange(0, PARTS)
    number = tl.load(numbers + head * stride + c, mask=c < stride, other=0)
    place = (head * G + g[:, None]) * parts + part
    known = (g[:, None] < G) & (part < parts)
    part_peaks = tl.load(peaks + place, mask=known, other=-float("inf"))
    part_totals = tl.load(totals + place, mask=known, other=0.0)
    peak = tl.max(part_peaks, 1)
    # Where every cluster is empty there is no peak, and no score either.
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(part_totals * tl.exp(part_peaks - peak[:, None]), 1)
    logsumexp = tl.where(g < G, peak + tl.log(tl.maximum(total, 1e-30)), 0.0)
    score = tl.zeros([BLOCK_C], tl.float32)
    for one in tl.static_range(G):
        logit = tl.load(logits + (head * G + one) * stride + c, mask=c < stride, other=-float("inf"))
        score += tl.exp(logit - tl.sum(tl.where(g == one, logsumexp, 0.0), 0))
    rank = ((score / G).to(tl.int32, bitcast=True) >> (23 - SCORE_BITS)) - least
    rank = tl.minimum(tl.maximum(rank, 0), (1 << (EXPONENT_BITS + SCORE_BITS)) - 1)
    # The largest rank that enough tokens reach: 0 where all of them together are too few.
    last = 0
    for bit in tl.static_range(EXPONENT_BITS + SCORE_BITS - 1, -1, -1):
        reached = tl.sum(tl.where(rank >= last + (1 << bit), number, 0), 0) >= budget
        last += reached.to(tl.int32) << bit
    above = tl.where(rank > last, number, 0)
    equal = tl.where(rank == last, number, 0)
    room = budget - tl.sum(above, 0)
    above_ends, equal_ends = tl.associative_scan((above, equal), 0, _sum_of_two)
    taken = above + tl.minimum(equal_ends, room) - tl.minimum(equal_ends - equal, room)
    left = number - taken
    tl.store(lengths + head * stride + c, taken, mask=c < stride)
    tl.store(ends + head * stride + c, above_ends + tl.minimum(equal_ends, room), mask=c < stride)
    log_of_left = tl.where(left > 0, tl.log(tl.maximum(left, 1).to(tl.float32)), -float("inf"))
    tl.store(log_left + head * stride + c, log_of_left, mask=c < stride)


def choose_clusters_triton(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ClusterChoice:
    """`choose_clusters` on a GPU; reads the centroids once, their logits once more."""
    (H, G, D), C = query.shape, centroids.shape[1]
    centroids, counts = centroids.to(query.dtype).contiguous(), counts.contiguous()
    parts = programs_per_head(H, C, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(query.device))
    stride = aligned(C)
    logits = torch.empty(H, G, stride, device=query.device)
    peaks, totals = torch.empty(2, H, G, parts, device=query.device)
    numbers, lengths, ends = torch.empty(3, H, stride, dtype=torch.int32, device=query.device)
    log_left = torch.empty(H, stride, device=query.device)
    _logits_kernel[(parts, H)](
        query.contiguous(), centroids, counts, logits, numbers, peaks, totals, C, stride, softmax_scale, softcap or 0.0,
        CAPPED=softcap is not None, G=G, GROUP=group_rows(G), D=D, BLOCK_D=power_of_two(D),
        TILE=tile_rows(D, query.dtype, TILE_BYTES), STAGES=STAGES, num_warps=WARPS,
        **following(query.device),
    )  # fmt: skip
    block = max(power_of_two(C), 128)
    _choose_kernel[(H,)](
        logits, numbers, peaks, totals, lengths, ends, log_left, stride, parts, budget, least_rank(budget),
        G=G, GROUP=power_of_two(G), BLOCK_C=block, PARTS=power_of_two(parts), SCORE_BITS=SCORE_BITS,
        EXPONENT_BITS=EXPONENT_BITS, num_warps=min(32, max(4, block // CLUSTERS_A_WARP)),
        **following(query.device),
    )  # fmt: skip
    return ClusterChoice(logits, lengths[:, :C], ends[:, :C], log_left)
