"""`choose_clusters` in Triton: logits and their sums over all multiprocessors, then one program a head that chooses.

A choice to a budget needs no sort: the score of the last cluster that is taken is found by bisection on the leading
bits of a float, which are ordered as the floats are where none is negative.
"""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.cluster_choice import EXPONENT_BITS, SCORE_BITS, TOKEN_BITS, ClusterChoice, least_rank
from sparsekv.kernels.launch import following, multiprocessors, programs_per_head
from sparsekv.kernels.tiles_triton import aligned, capped, dot, group_rows, power_of_two, share, start, tile_rows

PROGRAMS_PER_MULTIPROCESSOR = 4
TILE_BYTES, WARPS, STAGES = 32_768, 4, 2
CLUSTERS_A_WARP, CHUNK = 512, 8192


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
def _packed(logits, numbers, logsumexp, g, c, stride, least, G: tl.constexpr, SCORE_BITS: tl.constexpr,
            EXPONENT_BITS: tl.constexpr, TOKEN_BITS: tl.constexpr):  # fmt: skip
    """Of some clusters of a head the rank of the score, and below it the number of tokens, in one integer."""
    score = tl.zeros_like(c).to(tl.float32)
    for one in tl.static_range(G):
        logit = tl.load(logits + one * stride + c, mask=c < stride, other=-float("inf"))
        score += tl.exp(logit - tl.sum(tl.where(g == one, logsumexp, 0.0), 0))
    rank = ((score / G).to(tl.int32, bitcast=True) >> (23 - SCORE_BITS)) - least
    rank = tl.minimum(tl.maximum(rank, 0), (1 << (EXPONENT_BITS + SCORE_BITS)) - 1)
    number = tl.load(numbers + c, mask=c < stride, other=0)
    return (rank.to(tl.uint32) << TOKEN_BITS) | number.to(tl.uint32)


@triton.jit
def _tokens(packed, TOKEN_BITS: tl.constexpr):
    return (packed & ((1 << TOKEN_BITS) - 1)).to(tl.int32)


@triton.jit
def _sum_of_two(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["budget", "least"])
def _choose_kernel(
    logits, numbers, peaks, totals, scratch, lengths, ends, log_left,
    stride, parts, budget, least, G: tl.constexpr, GROUP: tl.constexpr, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr, SCORE_BITS: tl.constexpr, EXPONENT_BITS: tl.constexpr, TOKEN_BITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program a head: what a register cannot hold of many clusters is written out and read again, in chunks."""
    start(EARLY)
    head = tl.program_id(0).to(tl.int64)
    g, part = tl.arange(0, GROUP), tl.arange(0, PARTS)
    place = (head * G + g[:, None]) * parts + part
    known = (g[:, None] < G) & (part < parts)
    part_peaks = tl.load(peaks + place, mask=known, other=-float("inf"))
    part_totals = tl.load(totals + place, mask=known, other=0.0)
    peak = tl.max(part_peaks, 1)
    # Where every cluster is empty there is no peak, and no score either.
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(part_totals * tl.exp(part_peaks - peak[:, None]), 1)
    logsumexp = tl.where(g < G, peak + tl.log(tl.maximum(total, 1e-30)), 0.0)
    logits, numbers = logits + head * G * stride, numbers + head * stride
    scratch, lengths, ends, log_left = (
        scratch + head * stride, lengths + head * stride, ends + head * stride, log_left + head * stride
    )  # fmt: skip
    every = tl.arange(0, BLOCK_C)
    if BLOCK_C > CHUNK:
        for at in range(0, BLOCK_C, CHUNK):
            c = at + tl.arange(0, CHUNK)
            some = _packed(logits, numbers, logsumexp, g, c, stride, least, G, SCORE_BITS, EXPONENT_BITS, TOKEN_BITS)
            tl.store(scratch + c, some.to(tl.int32, bitcast=True), mask=c < stride)
        tl.debug_barrier()
        packed = tl.load(scratch + every, mask=every < stride, other=0).to(tl.uint32, bitcast=True)
    else:
        packed = _packed(logits, numbers, logsumexp, g, every, stride, least, G, SCORE_BITS, EXPONENT_BITS, TOKEN_BITS)
    # The largest rank that enough tokens reach: 0 where all of them together are too few.
    last = 0
    for bit in tl.static_range(EXPONENT_BITS + SCORE_BITS - 1, -1, -1):
        lowest = (last + (1 << bit)).to(tl.uint32) << TOKEN_BITS
        reached = tl.sum(tl.where(packed >= lowest, _tokens(packed, TOKEN_BITS), 0), 0) >= budget
        last += reached.to(tl.int32) << bit
    is_above = (packed >> TOKEN_BITS).to(tl.int32) > last
    room = budget - tl.sum(tl.where(is_above, _tokens(packed, TOKEN_BITS), 0), 0)
    above_before, equal_before = 0, 0
    for at in range(0, BLOCK_C, CHUNK):
        c = at + tl.arange(0, CHUNK)
        if BLOCK_C > CHUNK:
            chunk = tl.load(scratch + c, mask=c < stride, other=0).to(tl.uint32, bitcast=True)
        else:
            chunk = packed
        number, rank = _tokens(chunk, TOKEN_BITS), (chunk >> TOKEN_BITS).to(tl.int32)
        above, equal = tl.where(rank > last, number, 0), tl.where(rank == last, number, 0)
        above_ends, equal_ends = tl.associative_scan((above, equal), 0, _sum_of_two)
        above_ends, equal_ends = above_ends + above_before, equal_ends + equal_before
        taken = above + tl.minimum(equal_ends, room) - tl.minimum(equal_ends - equal, room)
        left = number - taken
        tl.store(lengths + c, taken, mask=c < stride)
        tl.store(ends + c, above_ends + tl.minimum(equal_ends, room), mask=c < stride)
        log_of_left = tl.where(left > 0, tl.log(tl.maximum(left, 1).to(tl.float32)), -float("inf"))
        tl.store(log_left + c, log_of_left, mask=c < stride)
        above_before, equal_before = above_before + tl.sum(above, 0), equal_before + tl.sum(equal, 0)


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
    # What one holds must fit its registers: a chunk of everything that is computed, and of all clusters one number.
    scratch = torch.empty(H, stride, dtype=torch.int32, device=query.device) if block > CHUNK else lengths
    _choose_kernel[(H,)](
        logits, numbers, peaks, totals, scratch, lengths, ends, log_left, stride, parts, budget, least_rank(budget),
        G=G, GROUP=power_of_two(G), BLOCK_C=block, CHUNK=min(block, CHUNK), PARTS=power_of_two(parts),
        SCORE_BITS=SCORE_BITS, EXPONENT_BITS=EXPONENT_BITS, TOKEN_BITS=TOKEN_BITS,
        num_warps=min(16, max(4, block // CLUSTERS_A_WARP)), **following(query.device),
    )  # fmt: skip
    return ClusterChoice(logits, lengths[:, :C], ends[:, :C], log_left)
