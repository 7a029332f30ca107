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
    exp2_flushed,
    log2_of_normal,
    power_of_two,
    product,
    share,
    tile_rows,
    wait_for_previous_kernel,
)

MOST_ROWS = 128  # of a tile of queries
TILE_BYTES, STAGES, WARPS, PROGRAMS_PER_SM = 16_384, 2, 4, 2
MOST_LOGITS = 4096  # of a tile of queries and one of clusters, so that two programs' are in an SM's registers


@triton.jit
def _tokens_and_heads(ROWS: tl.constexpr, GROUP: tl.constexpr):
    """The token and the query head of each row of a tile, GROUP rows a token.

    A thread has a row of a product and the eighth after it, so that two heads of a token lie eight rows apart: what is
    summed over heads is first summed without another thread. The others lie side by side."""
    r = tl.arange(0, ROWS)
    if GROUP == 1 or GROUP > 16:
        token, g = r // GROUP, r % GROUP
    else:
        token, g = r // 16 * (16 // GROUP) + r % 8 // (GROUP // 2), r % (GROUP // 2) * 2 + r // 8 % 2
    return token, g


@triton.jit
def _over_heads(each, ROWS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    """[ROWS // GROUP, TILE]: what a tile's rows [ROWS, TILE] have together for each token."""
    if GROUP == 1 or GROUP > 16:
        together = tl.sum(tl.reshape(each, [ROWS // GROUP, GROUP, TILE]), 1)
    else:
        eights = tl.sum(tl.reshape(each, [ROWS // 16, 2, 8, TILE]), 1)
        together = tl.sum(tl.reshape(eights, [ROWS // GROUP, GROUP // 2, TILE]), 1)
    return together


@triton.jit
def _query_rows(query, q_head, q_group, q_token, head, first, tokens, D: tl.constexpr, BLOCK_D: tl.constexpr,
                G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Query rows [ROWS, BLOCK_D] of tokens from `first` on, GROUP rows a token; zeros for missing ones."""
    token, g = _tokens_and_heads(ROWS, GROUP)
    token, d = first + token, tl.arange(0, BLOCK_D)
    place = query + head * q_head + g[:, None] * q_group + token[:, None] * q_token
    return tl.load(place + d, mask=((token < tokens) & (g < G))[:, None] & (d < D), other=0.0)


@triton.jit
def _tile_logits(q, centroids, counts, c, stop, softmax_scale, softcap, CAPPED: tl.constexpr, D: tl.constexpr,
                 BLOCK_D: tl.constexpr):  # fmt: skip
    """Logits [ROWS, TILE] in units of log 2, and how many tokens each cluster has."""
    d, known = tl.arange(0, BLOCK_D), c < stop
    k = tl.load(centroids + c[:, None] * D + d, mask=known[:, None] & (d < D), other=0.0)
    number = tl.load(counts + c, mask=known, other=0)
    products = dot(q, tl.trans(k))
    if CAPPED:
        logits = capped(products * softmax_scale, softcap, CAPPED) * LOG2_E
    else:
        logits = products * (softmax_scale * LOG2_E)
    return logits, number


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
        logits, number = _tile_logits(q, centroids, counts, c, stop, softmax_scale, softcap, CAPPED, D, BLOCK_D)
        if tl.program_id(2) == 0:
            tl.store(zeros + head * C + c, tl.zeros([TILE], tl.int32), mask=c < stop)
        log_number = log2_of_normal(tl.maximum(number, 1).to(tl.float32))
        logits += tl.where(number > 0, log_number, -float("inf"))
        highest = tl.maximum(peak, tl.max(logits, 1))
        # All clusters so far may be empty.
        safe = tl.where(highest == -float("inf"), 0.0, highest)
        total = total * exp2_flushed(peak - safe) + tl.sum(exp2_flushed(logits - safe[:, None]), 1)
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
    total = tl.sum(product(part_sums, exp2_flushed(part_peaks - peak[None, :])), 0)
    return peak + log2_of_normal(tl.maximum(total, 1e-30))


@triton.jit
def _store_scores(place, c, stop, present, logits, number, total, ROWS: tl.constexpr, GROUP: tl.constexpr,
                  TILE: tl.constexpr):  # fmt: skip
    """Store the scores that a tile's logits give each token, four at once, with zeros after the last cluster up to a
    multiple of 16."""
    each = exp2_flushed(logits - total[:, None])
    of_token = tl.where(number > 0, _over_heads(each, ROWS, GROUP, TILE), 0.0)
    tl.store(place + c, of_token, mask=present & (c < tl.multiple_of(tl.cdiv(stop, 16) * 16, 16)))


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
    first, stop = _whole_sixteens(part, parts, C)
    # The first tile's logits need nothing of the kernel before this one, and are computed while it runs.
    c = first + tl.arange(0, TILE)
    logits, number = _tile_logits(q, centroids, counts, c, stop, softmax_scale, softcap, CAPPED, D, BLOCK_D)
    wait_for_previous_kernel(EARLY)
    total = _logsumexp(peaks, sums, head * tl.num_programs(2) + tl.program_id(2), sum_parts, ROWS, PARTS)
    # Rows that pad a token's group count for nothing.
    _, g = _tokens_and_heads(ROWS, GROUP)
    total, present = tl.where(g < G, total, float("inf")), (token < tokens)[:, None]
    _store_scores(place, c, stop, present, logits, number, total, ROWS, GROUP, TILE)
    for at in tl.range(first + TILE, stop, TILE, num_stages=STAGES):
        c = at + tl.arange(0, TILE)
        logits, number = _tile_logits(q, centroids, counts, c, stop, softmax_scale, softcap, CAPPED, D, BLOCK_D)
        _store_scores(place, c, stop, present, logits, number, total, ROWS, GROUP, TILE)


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
        [H, T, C or more] float32; 0 past the last cluster.
    """
    (H, G, T, D), C, device, early = query.shape, counts.shape[1], query.device, dependent_launch(query.device)
    query = query if query.stride(3) == 1 else query.contiguous()
    centroids, counts, group = side_by_side(centroids.to(query.dtype)), side_by_side(counts), power_of_two(G)
    tile_of_queries, stride = max(16, group, min(MOST_ROWS, power_of_two(T * group))), aligned(C)
    blocks = triton.cdiv(T, tile_of_queries // group)
    tile = min(tile_rows(D, query.dtype, TILE_BYTES), MOST_LOGITS // tile_of_queries)
    parts = min(num_splits(H * blocks, C, PROGRAMS_PER_SM * count_sms(device)), triton.cdiv(C, tile))
    peaks, sums = torch.empty(2, H, blocks, parts, tile_of_queries, device=device)
    scores = torch.empty(H, T, stride, device=device)
    strides = *query.stride()[:3], centroids.stride(0), counts.stride(0), softmax_scale, softcap or 0.0
    tiles = {
        "CAPPED": softcap is not None, "G": G, "GROUP": group, "ROWS": tile_of_queries, "D": D,
        "BLOCK_D": power_of_two(D), "TILE": tile, "STAGES": STAGES, "num_warps": WARPS, **early,
    }  # fmt: skip
    _sums_kernel[(parts, H, blocks)](query, centroids, counts, peaks, sums, zeros, T, C, *strides, **tiles)
    _scores_kernel[(parts, H, blocks)](
        query, centroids, counts, peaks, sums, scores, T, C, stride, parts, *strides, PARTS=power_of_two(parts), **tiles
    )
    return scores
