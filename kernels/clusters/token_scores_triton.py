"""Scores of clusters for several tokens, in Triton: what the softmax divides by first, then the scores."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.clusters.cluster_choice_triton import side_by_side
from sparsekv.kernels.common.launch import count_sms, dependent_launch, num_splits
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

MOST_ROWS = 128  # of a tile of queries
TILE_BYTES, STAGES, WARPS, PROGRAMS_PER_SM = 16_384, 2, 4, 2


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
    query, centroids, counts, peaks, sums, zeros,
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
            tl.store(zeros + head * C + c, tl.zeros([TILE], tl.int32), mask=c < stop)
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

    The logits are computed once more: for 64 questions that takes less time than to store and load them.
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


def token_scores(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    zeros: torch.Tensor,
    softmax_scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """S_i of each token's query heads, summed over these: `cluster_scores` times G, for tokens in the place of queries.

    Reads the centroids twice for every `MOST_ROWS` query rows.

    Args:
        query: [H, G, T, D]; centroids: [H, C, D]; counts: [H, C] int.
        zeros: [H, C] int32 contiguous, to which zeros are written.

    Returns:
        [H, T, C or more] float32; what is past the last cluster is not written.
    """
    (H, G, T, D), C, device, early = query.shape, counts.shape[1], query.device, dependent_launch(query.device)
    query = query if query.stride(3) == 1 else query.contiguous()
    centroids, counts, group = side_by_side(centroids.to(query.dtype)), side_by_side(counts), power_of_two(G)
    tile_of_queries, stride = max(16, group, min(MOST_ROWS, power_of_two(T * group))), aligned(C)
    blocks = triton.cdiv(T, tile_of_queries // group)
    parts = num_splits(H * blocks, C, PROGRAMS_PER_SM * count_sms(device))
    peaks, sums = torch.empty(2, H, blocks, parts, tile_of_queries, device=device)
    scores = torch.empty(H, T, stride, device=device)
    strides = *query.stride()[:3], centroids.stride(0), counts.stride(0), softmax_scale, softcap or 0.0
    tiles = {
        "CAPPED": softcap is not None, "G": G, "GROUP": group, "ROWS": tile_of_queries, "D": D,
        "BLOCK_D": power_of_two(D), "TILE": tile_rows(D, query.dtype, TILE_BYTES), "STAGES": STAGES,
        "num_warps": WARPS, **early,
    }  # fmt: skip
    _sums_kernel[(parts, H, blocks)](query, centroids, counts, peaks, sums, zeros, T, C, *strides, **tiles)
    _scores_kernel[(parts, H, blocks)](
        query, centroids, counts, peaks, sums, scores, T, C, stride, parts, *strides, PARTS=power_of_two(parts), **tiles
    )
    return scores
