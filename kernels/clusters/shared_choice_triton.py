"""`choose_together` in Triton.

Two kernels score all clusters for each token, over all SMs: the first finds the sums that scores are divided by. In the
third, one program for each head and question ranks all clusters and takes its own. The fourth adds up what was taken,
and the fifth lists the rows.
"""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.clusters.choice_counts_triton import sum_of_three
from sparsekv.kernels.clusters.cluster_choice_triton import side_by_side
from sparsekv.kernels.clusters.types import EXPONENT_BITS, SCORE_BITS, SharedChoice, least_rank
from sparsekv.kernels.common.launch import count_sms, dependent_launch, num_splits
from sparsekv.kernels.common.run_rows_triton import list_rows
from sparsekv.kernels.common.tiles_triton import (
    LOG2_E,
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
PAIRS = tl.constexpr((EXPONENT_BITS + SCORE_BITS + 1) // 2)  # of a rank's bits
HIGHEST = tl.constexpr(2 ** (EXPONENT_BITS + SCORE_BITS) - 1)
DROPPED_BITS = tl.constexpr(23 - SCORE_BITS)  # of a score's fraction


@triton.jit
def _query_rows(query, q_head, q_group, q_token, head, first, tokens, D: tl.constexpr, BLOCK_D: tl.constexpr,
                G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Query rows [ROWS, BLOCK_D] of tokens from `first` on, GROUP rows a token; zeros for missing ones."""
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    token, g = first + r // GROUP, r % GROUP
    place = query + head * q_head + g[:, None] * q_group + token[:, None] * q_token
    return tl.load(place + d, mask=((token < tokens) & (g < G))[:, None] & (d < D), other=0.0)


@triton.jit
def _tile_logits(q, centroids, counts, c, stop, softmax_scale, softcap, CAPPED: tl.constexpr, D: tl.constexpr,
                 BLOCK_D: tl.constexpr):  # fmt: skip
    """Logits [ROWS, TILE] and, for each cluster, the logarithm of how many tokens it has; both in units of log 2."""
    d, known = tl.arange(0, BLOCK_D), c < stop
    k = tl.load(centroids + c[:, None] * D + d, mask=known[:, None] & (d < D), other=0.0)
    number = tl.load(counts + c, mask=known, other=0).to(tl.float32)
    products = dot(q, tl.trans(k))
    if CAPPED:
        logits = capped(products * softmax_scale, softcap, CAPPED) * LOG2_E
    else:
        logits = products * (softmax_scale * LOG2_E)
    return logits, tl.where(number > 0, tl.log2(tl.maximum(number, 1.0)), -float("inf"))


@triton.jit
def _whole_sixteens(part, parts, C):
    """A part's clusters from the first to the last; the first is a multiple of 16, so that scores are stored four at a
    time."""
    first, stop = share(part, parts, tl.cdiv(C, 16))
    return tl.multiple_of(first * 16, 16), tl.minimum(stop * 16, C)


@triton.jit(do_not_specialize=["tokens", "C"])
def _sums_kernel(
    query, centroids, counts, peaks, sums, lengths,
    tokens, C, q_head, q_group, q_token, centroids_stride, counts_stride, softmax_scale, softcap,
    CAPPED: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Log-sum-exps of some rows over a program's share of a head's clusters, as peaks and sums."""
    wait_for_previous_kernel(EARLY)
    part, parts, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    q = _query_rows(query, q_head, q_group, q_token, head, tl.program_id(2) * (ROWS // GROUP), tokens, D, BLOCK_D, G,
                    GROUP, ROWS)  # fmt: skip
    # Where tokens can be appended, heads are further apart than their clusters need.
    centroids, counts = centroids + head * centroids_stride, counts + head * counts_stride
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    first, stop = _whole_sixteens(part, parts, C)
    for at in tl.range(first, stop, TILE, num_stages=STAGES):
        c = at + tl.arange(0, TILE)
        logits, log_number = _tile_logits(q, centroids, counts, c, stop, softmax_scale, softcap, CAPPED, D, BLOCK_D)
        if tl.program_id(2) == 0:
            tl.store(lengths + head * C + c, tl.zeros([TILE], tl.int32), mask=c < stop)
        logits += log_number
        highest = tl.maximum(peak, tl.max(logits, 1))
        # All clusters so far may be empty.
        safe = tl.where(highest == -float("inf"), 0.0, highest)
        total = total * tl.exp2(peak - safe) + tl.sum(tl.exp2(logits - safe[:, None]), 1)
        peak = highest
    place = ((head * tl.num_programs(2) + tl.program_id(2)) * parts + part) * ROWS + tl.arange(0, ROWS)
    tl.store(peaks + place, peak)
    tl.store(sums + place, total)


@triton.jit
def _logsumexp(peaks, sums, block, parts, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """[ROWS] in units of log 2, over all parts; of a row with nothing but empty clusters, which score 0, any number."""
    part, r = tl.arange(0, PARTS)[:, None], tl.arange(0, ROWS)[None, :]
    place = (block * parts + part) * ROWS + r
    part_peaks = tl.load(peaks + place, mask=part < parts, other=-float("inf"))
    part_sums = tl.load(sums + place, mask=part < parts, other=0.0)
    peak = tl.max(part_peaks, 0)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    return peak + tl.log2(tl.maximum(tl.sum(part_sums * tl.exp2(part_peaks - peak[None, :]), 0), 1e-30))


@triton.jit(do_not_specialize=["tokens", "C"])
def _scores_kernel(
    query, centroids, counts, peaks, sums, scores,
    tokens, C, stride, sum_parts, q_head, q_group, q_token, centroids_stride, counts_stride, softmax_scale, softcap,
    CAPPED: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """S_i of some tokens for a program's share of a head's clusters, summed over the tokens' query heads.

    The logits are computed once more, which takes less time than storing and loading them.
    """
    part, parts, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    held: tl.constexpr = ROWS // GROUP
    first_token = tl.program_id(2) * held
    q = _query_rows(query, q_head, q_group, q_token, head, first_token, tokens, D, BLOCK_D, G, GROUP, ROWS)
    centroids, counts = centroids + head * centroids_stride, counts + head * counts_stride
    token = first_token + tl.arange(0, held)
    place = scores + (head * tokens + token[:, None]) * stride
    wait_for_previous_kernel(EARLY)
    total = _logsumexp(peaks, sums, head * tl.num_programs(2) + tl.program_id(2), sum_parts, ROWS, PARTS)
    # Rows that pad a token's group count for nothing.
    total = tl.where(tl.arange(0, ROWS) % GROUP < G, total, float("inf"))
    first, stop = _whole_sixteens(part, parts, C)
    for at in tl.range(first, stop, TILE, num_stages=STAGES):
        c = at + tl.arange(0, TILE)
        logits, log_number = _tile_logits(q, centroids, counts, c, stop, softmax_scale, softcap, CAPPED, D, BLOCK_D)
        each = tl.exp2(logits - total[:, None])
        of_token = tl.sum(tl.reshape(each, [held, GROUP, TILE]), 1)
        of_token = tl.where(log_number > -float("inf"), of_token, 0.0)
        tl.store(place + c, of_token, mask=(token < tokens)[:, None] & (c < stop))


@triton.jit
def _last_rank(rank, size, budget):
    """The highest rank from which on, upwards, clusters hold the budget; 0 if all of them do not. Two of its bits are
    found at a time, because each reduction makes all threads of a program wait."""
    reached = 0
    for step in tl.static_range(PAIRS):
        unit = 4 ** (PAIRS - 1 - step)
        one = tl.where(rank >= reached + unit, size, 0)
        two = tl.where(rank >= reached + 2 * unit, size, 0)
        three = tl.where(rank >= reached + 3 * unit, size, 0)
        one, two, three = tl.reduce((one, two, three), 0, sum_of_three)
        reached += unit * ((one >= budget).to(tl.int32) + (two >= budget).to(tl.int32) + (three >= budget).to(tl.int32))
    return reached


@triton.jit(do_not_specialize=["tokens", "C", "budget", "least"])
def _take_kernel(
    scores, ends, counts, thresholds, lengths, tokens, C, stride, counts_stride, budget, least,
    KEEP: tl.constexpr, G: tl.constexpr, CLUSTERS: tl.constexpr, EARLY: tl.constexpr,
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
    for token in range(first, last):
        score += tl.load(scores + (head * tokens + token) * stride + c, mask=c < C, other=0.0)
    score = score / ((last - first) * G)
    if KEEP:
        taken = tl.where(score >= tl.load(thresholds + question), size, 0)
    else:
        rank = (score.to(tl.int32, bitcast=True) >> DROPPED_BITS) - least
        rank = tl.minimum(tl.maximum(rank, 0), HIGHEST)
        reached = _last_rank(rank, size, budget)
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
) -> SharedChoice:
    """`choose_together` on a GPU; reads the centroids twice for every `MOST_ROWS` rows."""
    (H, G, T, D), C, device, early = query.shape, counts.shape[1], query.device, dependent_launch(query.device)
    query = query if query.stride(3) == 1 else query.contiguous()
    centroids, counts, group = side_by_side(centroids.to(query.dtype)), side_by_side(counts), power_of_two(G)
    tile_of_queries, stride = max(16, group, min(MOST_ROWS, power_of_two(T * group))), aligned(C)
    blocks = triton.cdiv(T, tile_of_queries // group)
    parts = num_splits(H * blocks, C, PROGRAMS_PER_SM * count_sms(device))
    peaks, sums = torch.empty(2, H, blocks, parts, tile_of_queries, device=device)
    scores, log_left = torch.empty(H, T, stride, device=device), torch.empty(H, stride, device=device)
    lengths, running = torch.empty(2, H, C, dtype=torch.int32, device=device)
    used = torch.empty(H, dtype=torch.int32, device=device)
    rows = torch.empty(H, aligned(max(capacity, 1)), dtype=torch.int32, device=device)
    strides = *query.stride()[:3], centroids.stride(0), counts.stride(0), softmax_scale, softcap or 0.0
    tiles = {
        "CAPPED": softcap is not None, "G": G, "GROUP": group, "ROWS": tile_of_queries, "D": D,
        "BLOCK_D": power_of_two(D), "TILE": tile_rows(D, query.dtype, TILE_BYTES), "STAGES": STAGES, "num_warps": WARPS,
    }  # fmt: skip
    _sums_kernel[(parts, H, blocks)](
        query, centroids, counts, peaks, sums, lengths, T, C, *strides, **tiles, **early
    )  # fmt: skip
    _scores_kernel[(parts, H, blocks)](
        query, centroids, counts, peaks, sums, scores, T, C, stride, parts, *strides, PARTS=power_of_two(parts),
        **tiles, **early,
    )  # fmt: skip
    whole = {"CLUSTERS": power_of_two(stride), **early}
    whole["num_warps"] = min(32, max(4, whole["CLUSTERS"] // CLUSTERS_A_WARP))
    _take_kernel[(len(ends), H)](
        scores, ends, counts, scores if thresholds is None else thresholds, lengths, T, C, stride, counts.stride(0),
        budget, least_rank(budget), KEEP=thresholds is not None, G=G, **whole,
    )  # fmt: skip
    _unite_kernel[(H,)](
        lengths, counts, log_left, running, used, used if seen is None else seen, C, stride, counts.stride(0), capacity,
        SEEN=seen is not None, **whole,
    )  # fmt: skip
    list_rows(starts, running, rows, capacity)
    return SharedChoice(lengths, log_left, rows, used)
