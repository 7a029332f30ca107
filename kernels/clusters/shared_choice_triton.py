"""`choose_together` in Triton.

The first kernel computes the logits of all rows, over all SMs; in the second one program for each head and question
ranks all clusters and takes its own; the third adds up what was taken; the fourth lists the rows.
"""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.clusters.cluster_choice_triton import side_by_side
from sparsekv.kernels.clusters.types import EXPONENT_BITS, SCORE_BITS, ClusterChoice, least_rank
from sparsekv.kernels.common.launch import count_sms, dependent_launch, num_splits
from sparsekv.kernels.common.run_rows_triton import list_rows
from sparsekv.kernels.common.tiles_triton import (
    aligned,
    capped,
    dot,
    power_of_two,
    share,
    tile_rows,
    wait_for_previous_kernel,
)

MOST_ROWS = 64  # of a tile of queries
TILE_BYTES, STAGES, WARPS, PROGRAMS_PER_SM = 16_384, 2, 4, 2
CLUSTERS_A_WARP = 512
RANK_BITS, HIGHEST = tl.constexpr(EXPONENT_BITS + SCORE_BITS), tl.constexpr(2 ** (EXPONENT_BITS + SCORE_BITS) - 1)
DROPPED_BITS = tl.constexpr(23 - SCORE_BITS)  # of a score's fraction


@triton.jit(do_not_specialize=["R", "C"])
def _logits_kernel(
    query, centroids, counts, logits, peaks, totals, lengths,
    R, C, q_head, q_group, q_token, stride, centroids_stride, counts_stride, softmax_scale, softcap,
    CAPPED: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Logits of some rows on a program's share of a head's centroids, with the parts' log-sum-exps."""
    wait_for_previous_kernel(EARLY)
    part, parts, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    r, d, t = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    of_row = query + head * q_head + (r % G)[:, None] * q_group + (r // G)[:, None] * q_token
    q = tl.load(of_row + d, mask=(r[:, None] < R) & (d < D), other=0.0)
    # Where tokens can be appended, heads are further apart than their clusters need.
    centroids, counts, lengths = centroids + head * centroids_stride, counts + head * counts_stride, lengths + head * C
    place = logits + (head * R + r[:, None]) * stride
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # The last cluster is followed by empty ones, up to a multiple of 16.
    first, stop = share(part, parts, tl.cdiv(C, 16))
    first, stop = tl.multiple_of(first * 16, 16), tl.multiple_of(stop * 16, 16)
    for at in tl.range(first, stop, TILE, num_stages=STAGES):
        c = at + t
        known = (c < stop) & (c < C)
        k = tl.load(centroids + c[:, None] * D + d, mask=known[:, None] & (d < D), other=0.0)
        number = tl.load(counts + c, mask=known, other=0).to(tl.int32)
        scores = capped(dot(q, tl.trans(k)) * softmax_scale, softcap, CAPPED)
        scores = tl.where(number > 0, scores, -float("inf"))
        tl.store(place + c, scores, mask=(r[:, None] < R) & (c < stop))
        if tl.program_id(2) == 0:
            tl.store(lengths + c, tl.zeros([TILE], tl.int32), mask=known)
        highest = tl.maximum(peak, tl.max(scores, 1))
        # All clusters so far may be empty.
        safe = tl.where(highest == -float("inf"), 0.0, highest)
        total = total * tl.exp(peak - safe) + tl.sum(tl.exp(scores - safe[:, None]) * number.to(tl.float32), 1)
        peak = highest
    of_part = (head * R + r) * parts + part
    tl.store(peaks + of_part, peak, mask=r < R)
    tl.store(totals + of_part, total, mask=r < R)


@triton.jit
def _logsumexp(peaks, totals, parts, PARTS: tl.constexpr):
    """Of one row over all parts."""
    part = tl.arange(0, PARTS)
    part_peaks = tl.load(peaks + part, mask=part < parts, other=-float("inf"))
    part_totals = tl.load(totals + part, mask=part < parts, other=0.0)
    peak = tl.max(part_peaks, 0)
    # If every cluster is empty the peak is infinite, and all scores are 0.
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    return peak + tl.log(tl.maximum(tl.sum(part_totals * tl.exp(part_peaks - peak), 0), 1e-30))


@triton.jit(do_not_specialize=["R", "C", "budget", "least"])
def _take_kernel(
    logits, peaks, totals, ends, counts, thresholds, lengths,
    R, C, stride, counts_stride, parts, budget, least,
    KEEP: tl.constexpr, G: tl.constexpr, CLUSTERS: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What one question takes of a head's clusters, joined to what others take."""
    question, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, CLUSTERS)
    size = tl.load(counts + head * counts_stride + c, mask=c < C, other=0).to(tl.int32)
    first, last = 0, tl.load(ends + question)
    if question > 0:
        first = tl.load(ends + question - 1)
    wait_for_previous_kernel(EARLY)
    score = tl.zeros([CLUSTERS], tl.float32)
    for r in range(first * G, last * G):
        row = head * R + r
        total = _logsumexp(peaks + row * parts, totals + row * parts, parts, PARTS)
        score += tl.exp(tl.load(logits + row * stride + c, mask=c < C, other=-float("inf")) - total)
    score = score / ((last - first) * G)
    if KEEP:
        taken = tl.where(score >= tl.load(thresholds + question), size, 0)
    else:
        rank = (score.to(tl.int32, bitcast=True) >> DROPPED_BITS) - least
        rank = tl.minimum(tl.maximum(rank, 0), HIGHEST)
        # The highest rank from which on, upwards, clusters hold the budget; 0 if all of them do not.
        reached = 0
        for bit in tl.static_range(RANK_BITS):
            candidate = reached + (2 ** (RANK_BITS - 1 - bit))
            held = tl.sum(tl.where(rank >= candidate, size, 0), 0)
            reached = tl.where(held >= budget, candidate, reached)
        held = tl.sum(tl.where(rank > reached, size, 0), 0)
        equal = tl.where(rank == reached, size, 0)
        room = budget - held - (tl.cumsum(equal, 0) - equal)
        taken = tl.where(rank > reached, size, tl.minimum(tl.maximum(room, 0), equal))
    tl.atomic_max(lengths + head * C + c, taken, mask=(c < C) & (taken > 0), sem="relaxed")


@triton.jit(do_not_specialize=["C"])
def _unite_kernel(
    lengths, counts, log_left, ends, used, seen, C, stride, counts_stride, capacity,
    SEEN: tl.constexpr, CLUSTERS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Running sums of a head's lengths, and the log of how many tokens of each cluster are left."""
    head, c = tl.program_id(0).to(tl.int64), tl.arange(0, CLUSTERS)
    size = tl.load(counts + head * counts_stride + c, mask=c < C, other=0).to(tl.int32)
    wait_for_previous_kernel(EARLY)
    taken = tl.load(lengths + head * C + c, mask=c < C, other=0)
    left = size - taken
    log_of_left = tl.where(left > 0, tl.log(tl.maximum(left, 1).to(tl.float32)), -float("inf"))
    tl.store(log_left + head * stride + c, log_of_left, mask=c < stride)
    tl.store(ends + head * C + c, tl.cumsum(taken, 0), mask=c < C)
    number = tl.minimum(tl.sum(taken, 0), capacity)
    tl.store(used + head, number)
    if SEEN:
        tl.atomic_add(seen + head, number.to(tl.int64), sem="relaxed")


def choose_together_triton(
    query: torch.Tensor,
    ends: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    budget: int,
    capacity: int,
    softmax_scale: float,
    softcap: float | None = None,
    thresholds: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> ClusterChoice:
    """`choose_together` on a GPU; reads the centroids once for every `MOST_ROWS` rows, their logits twice more."""
    (H, G, T, D), C, device, early = query.shape, counts.shape[1], query.device, dependent_launch(query.device)
    query, R = query if query.stride(3) == 1 else query.contiguous(), T * G
    centroids, counts = side_by_side(centroids.to(query.dtype)), side_by_side(counts)
    rows_of_tile, stride = min(MOST_ROWS, max(16, power_of_two(R))), aligned(C)
    blocks = triton.cdiv(R, rows_of_tile)
    parts = num_splits(H * blocks, C, PROGRAMS_PER_SM * count_sms(device))
    logits, log_left = torch.empty(H, R, stride, device=device), torch.empty(H, stride, device=device)
    peaks, totals = torch.empty(2, H, R, parts, device=device)
    lengths, sums = torch.empty(2, H, C, dtype=torch.int32, device=device)
    used = torch.empty(H, dtype=torch.int32, device=device)
    rows = torch.empty(H, aligned(max(capacity, 1)), dtype=torch.int32, device=device)
    _logits_kernel[(parts, H, blocks)](
        query, centroids, counts, logits, peaks, totals, lengths, R, C, *query.stride()[:3], stride,
        centroids.stride(0), counts.stride(0), softmax_scale, softcap or 0.0, CAPPED=softcap is not None, G=G,
        ROWS=rows_of_tile, D=D,
        BLOCK_D=power_of_two(D), TILE=tile_rows(D, query.dtype, TILE_BYTES), STAGES=STAGES, num_warps=WARPS, **early,
    )  # fmt: skip
    whole = {"CLUSTERS": power_of_two(stride), **early}
    whole["num_warps"] = min(32, max(4, whole["CLUSTERS"] // CLUSTERS_A_WARP))
    _take_kernel[(len(ends), H)](
        logits, peaks, totals, ends, counts, peaks if thresholds is None else thresholds, lengths, R, C, stride,
        counts.stride(0), parts, budget, least_rank(budget), KEEP=thresholds is not None, G=G,
        PARTS=power_of_two(parts), **whole,
    )  # fmt: skip
    _unite_kernel[(H,)](
        lengths, counts, log_left, sums, used, used if seen is None else seen, C, stride, counts.stride(0), capacity,
        SEEN=seen is not None, **whole,
    )  # fmt: skip
    list_rows(starts, sums, rows, capacity)
    return ClusterChoice(logits, lengths, log_left, rows, used)
