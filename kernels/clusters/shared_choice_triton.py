"""Choice of clusters for several questions over one document, in Triton: scores of each token, then the choice."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.clusters.cluster_choice import (
    EXPONENT_BITS,
    MOST_TOKENS,
    SCORE_BITS,
    TOKEN_BITS,
    SharedChoice,
    least_rank,
)
from sparsekv.kernels.common import tiles_triton as common
from sparsekv.kernels.common.launch import (
    aligned,
    count_sms,
    dependent_launch,
    num_splits,
    power_of_two,
    side_by_side,
    tile_rows,
    unit_stride,
)
from sparsekv.kernels.common.tiles_triton import LOG2_E

MOST_ROWS = 128  # most rows of a tile of queries
TILE_BYTES, STAGES, WARPS, PROGRAMS_PER_SM = 16_384, 2, 4, 2
MOST_LOGITS = 4096  # most logits of a program's tile, so that an SM's registers hold the tiles of two programs


@triton.jit
def _tokens_and_heads(ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Return the token and the query head of each row of a tile, with GROUP rows for each token.

    A thread holds row r and row r + 8 of a product. Therefore, for 2 to 16 rows a token, two heads of a token are
    placed eight rows apart: a sum over heads first adds these two within a thread. Otherwise a token's heads are in
    adjacent rows.
    """
    r = tl.arange(0, ROWS)
    if GROUP == 1 or GROUP > 16:
        token, g = r // GROUP, r % GROUP
    else:
        token, g = r // 16 * (16 // GROUP) + r % 8 // (GROUP // 2), r % (GROUP // 2) * 2 + r // 8 % 2
    return token, g


@triton.jit
def _over_heads(each, ROWS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Sum a tile's rows [ROWS, TILE] over the heads of each token; return [ROWS // GROUP, TILE]."""
    if GROUP == 1 or GROUP > 16:
        together = tl.sum(tl.reshape(each, [ROWS // GROUP, GROUP, TILE]), 1)
    else:
        eights = tl.sum(tl.reshape(each, [ROWS // 16, 2, 8, TILE]), 1)
        together = tl.sum(tl.reshape(eights, [ROWS // GROUP, GROUP // 2, TILE]), 1)
    return together


@triton.jit
def _query_rows(query, q_head, q_group, q_token, head, first, tokens, D: tl.constexpr, BLOCK_D: tl.constexpr,
                G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Load query rows [ROWS, BLOCK_D] of tokens from `first` on, GROUP rows for each token.

    Rows past the last token or head are zero.
    """
    token, g = _tokens_and_heads(ROWS, GROUP)
    token, d = first + token, tl.arange(0, BLOCK_D)
    place = query + head * q_head + g[:, None] * q_group + token[:, None].to(tl.int64) * q_token
    return tl.load(place + d, mask=((token < tokens) & (g < G))[:, None] & (d < D), other=0.0)


@triton.jit
def _tile_logits(q, centroids, counts, c, stop, softmax_scale, softcap, CAPPED: tl.constexpr, D: tl.constexpr,
                 BLOCK_D: tl.constexpr):  # fmt: skip
    """Compute the logits [ROWS, TILE] of clusters `c`, in units of log 2; also return the clusters' token counts."""
    d, known = tl.arange(0, BLOCK_D), c < stop
    k = tl.load(centroids + c[:, None] * D + d, mask=known[:, None] & (d < D), other=0.0)
    number = tl.load(counts + c, mask=known, other=0)
    products = common.dot(q, tl.trans(k))
    if CAPPED:
        logits = common.capped(products * softmax_scale, softcap, CAPPED) * LOG2_E
    else:
        logits = products * (softmax_scale * LOG2_E)
    return logits, number


@triton.jit
def _whole_sixteens(part, parts, C):
    """Return the range of a part's clusters.

    Its start is a multiple of 16, so that scores are stored four at a time.
    """
    first, stop = common.share(part, parts, tl.cdiv(C, 16))
    return tl.multiple_of(first * 16, 16), tl.minimum(stop * 16, C)


@triton.jit(do_not_specialize=["tokens", "C"])
def _sums_kernel(
    query, centroids, counts, peaks, sums, zeros,
    tokens, C, q_head, q_group, q_token, centroids_stride, counts_stride, softmax_scale, softcap,
    CAPPED: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the peak of some query rows' logits plus log counts, and the sum of exponentials relative to the peak.

    Both are over a program's share of a head's clusters. Also set the program's share of `zeros` to 0.
    """
    common.wait_for_previous_kernel(EARLY)
    part, parts, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    q = _query_rows(query, q_head, q_group, q_token, head, tl.program_id(2) * (ROWS // GROUP), tokens, D, BLOCK_D, G,
                    GROUP, ROWS)  # fmt: skip
    # With room for appended tokens, the stride between heads is larger than the size of a head's clusters.
    centroids, counts = centroids + head * centroids_stride, counts + head * counts_stride
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    first, stop = _whole_sixteens(part, parts, C)
    for at in tl.range(first, stop, TILE, num_stages=STAGES):
        c = at + tl.arange(0, TILE)
        logits, number = _tile_logits(q, centroids, counts, c, stop, softmax_scale, softcap, CAPPED, D, BLOCK_D)
        if tl.program_id(2) == 0:
            tl.store(zeros + head * C + c, tl.zeros([TILE], tl.int32), mask=c < stop)
        log_number = common.log2_of_normal(tl.maximum(number, 1).to(tl.float32))
        logits += tl.where(number > 0, log_number, -float("inf"))
        peak, weights, shrink = common.tile_weights(peak, logits)
        total = total * shrink + tl.sum(weights, 1)
    place = ((head * tl.num_programs(2) + tl.program_id(2)) * parts + part) * ROWS + tl.arange(0, ROWS)
    tl.store(peaks + place, peak)
    tl.store(sums + place, total)


@triton.jit
def _logsumexp(peaks, sums, block, parts, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Compute the log-sum-exps [ROWS] over all parts, in units of log 2.

    If all clusters are empty, the value is arbitrary, because empty clusters score 0.
    """
    part, r = tl.arange(0, PARTS)[:, None], tl.arange(0, ROWS)[None, :]
    place = (block * parts + part) * ROWS + r
    part_peaks = tl.load(peaks + place, mask=part < parts, other=-float("inf"))
    part_sums = tl.load(sums + place, mask=part < parts, other=0.0)
    peak = tl.max(part_peaks, 0)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(common.product(part_sums, common.exp2_flushed(part_peaks - peak[None, :])), 0)
    return peak + common.log2_of_normal(tl.maximum(total, 1e-30))


@triton.jit
def _store_scores(place, c, stop, present, logits, number, total, ROWS: tl.constexpr, GROUP: tl.constexpr,
                  TILE: tl.constexpr):  # fmt: skip
    """Store each token's scores for a tile of clusters, four at a time.

    Zeros follow the last cluster, up to a multiple of 16.
    """
    each = common.exp2_flushed(logits - total[:, None])
    of_token = tl.where(number > 0, _over_heads(each, ROWS, GROUP, TILE), 0.0)
    tl.store(place + c, of_token, mask=present & (c < tl.multiple_of(tl.cdiv(stop, 16) * 16, 16)))


@triton.jit(do_not_specialize=["tokens", "C"])
def _scores_kernel(
    query, centroids, counts, peaks, sums, scores,
    tokens, C, stride, sum_parts, q_head, q_group, q_token, centroids_stride, counts_stride, softmax_scale, softcap,
    CAPPED: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the scores S_i of a program's share of a head's clusters for some tokens.

    Cluster i with centroid C_i and N_i tokens has S_i = exp(q C_i) / sum_j N_j exp(q C_j), where q C_i is the scaled
    logit, soft-capped with CAPPED. S_i is summed over a token's query heads.

    The logits are computed a second time. For 64 questions that takes less time than storing and loading them.
    """
    part, parts, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    held: tl.constexpr = ROWS // GROUP
    first_token = tl.program_id(2) * held
    q = _query_rows(query, q_head, q_group, q_token, head, first_token, tokens, D, BLOCK_D, G, GROUP, ROWS)
    centroids, counts = centroids + head * centroids_stride, counts + head * counts_stride
    token = first_token + tl.arange(0, held)
    place = scores + (head * tokens + token[:, None]) * stride
    first, stop = _whole_sixteens(part, parts, C)
    # The first tile's logits do not depend on the previous kernel, and are computed while it runs.
    c = first + tl.arange(0, TILE)
    logits, number = _tile_logits(q, centroids, counts, c, stop, softmax_scale, softcap, CAPPED, D, BLOCK_D)
    common.wait_for_previous_kernel(EARLY)
    total = _logsumexp(peaks, sums, head * tl.num_programs(2) + tl.program_id(2), sum_parts, ROWS, PARTS)
    # Rows that pad a token's group add 0 to the token's scores.
    _, g = _tokens_and_heads(ROWS, GROUP)
    total, present = tl.where(g < G, total, float("inf")), (token < tokens)[:, None]
    _store_scores(place, c, stop, present, logits, number, total, ROWS, GROUP, TILE)
    for at in tl.range(first + TILE, stop, TILE, num_stages=STAGES):
        c = at + tl.arange(0, TILE)
        logits, number = _tile_logits(q, centroids, counts, c, stop, softmax_scale, softcap, CAPPED, D, BLOCK_D)
        _store_scores(place, c, stop, present, logits, number, total, ROWS, GROUP, TILE)


# A program that lists rows handles LISTED clusters and writes RUN rows of each at a time. It counts the rows of all
# earlier clusters, BEFORE clusters at a time.
LISTED, RUN, BEFORE = 64, 16, 1024
CLUSTERS_A_WARP, MOST_WARPS = 1024, 32  # clusters per warp, and most warps, of a program that ranks clusters
FEW_WARPS, REGISTERS = 8, 128  # two programs of FEW_WARPS warps fit on an SM with REGISTERS registers per thread
BITS = tl.constexpr(EXPONENT_BITS + SCORE_BITS)  # bits of a rank
HIGHEST = tl.constexpr(2 ** (EXPONENT_BITS + SCORE_BITS) - 1)
DROPPED_BITS = tl.constexpr(23 - SCORE_BITS)  # fraction bits of a score that its rank leaves out
# The low bits of a packed rank and size hold the size: their number, and their mask.
SIZE_BITS, SIZES = tl.constexpr(TOKEN_BITS), tl.constexpr(MOST_TOKENS)


@triton.jit
def _last_rank(clusters, budget):
    """Find the highest rank such that clusters of this rank or above hold the budget; 0 if no rank does.

    A cluster's rank and size are packed in one integer, with the rank in the upper bits. With two integers, a program
    would need so many registers that a second program would not fit on the SM. The lower bits are wide enough for the
    token count of a head. Therefore the lower bits of a sum of packed integers are the exact sum of the sizes.
    """
    reached = tl.full([], 0, tl.uint32)
    for step in tl.static_range(BITS):
        rank = reached + 2 ** (BITS - 1 - step)
        held = tl.sum(tl.where(clusters >= rank << SIZE_BITS, clusters, 0), 0) & SIZES
        reached = tl.where(held.to(tl.int32) >= budget, rank, reached)
    return reached


@triton.jit(do_not_specialize=["tokens", "C", "budget", "least"])
def _take_kernel(
    scores, ends, counts, thresholds, lengths, tokens, C, stride, counts_stride, budget, least,
    KEEP: tl.constexpr, G: tl.constexpr, CLUSTERS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Choose one question's clusters in a head, and merge them with the choices of the other questions.

    With KEEP, the question takes all clusters whose score reaches its threshold. Otherwise it takes the best clusters
    up to the budget. An atomic maximum keeps, for each cluster, the largest number of tokens that any question takes.
    """
    question, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, CLUSTERS)
    size = tl.load(counts + head * counts_stride + c, mask=c < C, other=0).to(tl.int32)
    first, last = 0, tl.load(ends + question)
    if question > 0:
        first = tl.load(ends + question - 1)
    common.wait_for_previous_kernel(EARLY)
    score = tl.zeros([CLUSTERS], tl.float32)
    # Rows of scores are padded to a multiple of 16, so that four are loaded at once. The padding has size 0.
    for token in range(first, last):
        score += tl.load(scores + (head * tokens + token) * stride + c, mask=c < stride, other=0.0)
    score = score * (1.0 / ((last - first) * G))
    if KEEP:
        taken = tl.where(score >= tl.load(thresholds + question), size, 0)
    else:
        rank = (score.to(tl.int32, bitcast=True) >> DROPPED_BITS) - least
        rank = tl.minimum(tl.maximum(rank, 0), HIGHEST).to(tl.uint32)
        clusters = (rank << SIZE_BITS) | size.to(tl.uint32)
        reached = _last_rank(clusters, budget)
        rank, size = clusters >> SIZE_BITS, (clusters & SIZES).to(tl.int32)
        held = tl.sum(tl.where(rank > reached, size, 0), 0)
        equal = tl.where(rank == reached, size, 0)
        room = budget - held - (tl.cumsum(equal, 0) - equal)
        taken = tl.where(rank > reached, size, tl.minimum(tl.maximum(room, 0), equal))
    tl.atomic_max(lengths + head * C + c, taken, mask=(c < C) & (taken > 0), sem="relaxed")


@triton.jit(do_not_specialize=["C", "capacity"])
def _list_kernel(
    lengths, counts, starts, log_left, rows, used, seen, C, stride, counts_stride, starts_stride, rows_stride, capacity,
    SEEN: tl.constexpr, CLUSTERS: tl.constexpr, RUN: tl.constexpr, BEFORE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """List the rows taken from a program's clusters, and write the log of each cluster's remaining token count.

    The rows follow those of the clusters before the program's own. Each program counts these earlier rows itself.
    """
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c, t, b = part * CLUSTERS + tl.arange(0, CLUSTERS), tl.arange(0, RUN), tl.arange(0, BEFORE)
    size = tl.load(counts + head * counts_stride + c, mask=c < C, other=0).to(tl.int32)
    start = tl.load(starts + head * starts_stride + c, mask=c < C, other=0).to(tl.int32)
    common.wait_for_previous_kernel(EARLY)
    lengths += head * C
    taken = tl.load(lengths + c, mask=c < C, other=0)
    left = size - taken
    log_of_left = tl.where(left > 0, tl.log(tl.maximum(left, 1).to(tl.float32)), -float("inf"))
    tl.store(log_left + head * stride + c, log_of_left, mask=c < stride)
    each = tl.zeros([BEFORE], tl.int32)
    for at in range(0, part * CLUSTERS, BEFORE):
        each += tl.load(lengths + at + b, mask=at + b < part * CLUSTERS, other=0)
    before = tl.sum(each, 0)
    slot = before + tl.cumsum(taken, 0) - taken
    if part == tl.num_programs(0) - 1:
        number = tl.minimum(before + tl.sum(taken, 0), capacity)
        tl.store(used + head, number)
        if SEEN:
            tl.atomic_add(seen + head, number.to(tl.int64), sem="relaxed")
    rows += head * rows_stride
    for at in range(0, tl.max(taken, 0), RUN):
        of_run = at + t
        place = slot[:, None] + of_run
        inside = (of_run < taken[:, None]) & (place < capacity)
        tl.store(rows + place, start[:, None] + of_run, mask=inside)


def choose_together_triton(
    query, ends, centroids, counts, starts, budget, capacity, softmax_scale, softcap=None, thresholds=None, seen=None
):
    """Run `choose_together` on a GPU; reads the centroids twice for every `MOST_ROWS` query rows."""
    (H, G, T, D), B, C, device = query.shape, len(ends), counts.shape[1], query.device
    query, centroids, early = unit_stride(query), side_by_side(centroids.to(query.dtype)), dependent_launch(device)
    counts, starts = side_by_side(counts), side_by_side(starts)
    group, stride = power_of_two(G), aligned(C)
    tile_of_queries = max(16, group, min(MOST_ROWS, power_of_two(T * group)))
    blocks = triton.cdiv(T, tile_of_queries // group)
    tile = min(tile_rows(D, query.dtype, TILE_BYTES), MOST_LOGITS // tile_of_queries)
    parts = min(num_splits(H * blocks, C, PROGRAMS_PER_SM * count_sms(device)), triton.cdiv(C, tile))
    peaks, sums = torch.empty(2, H, blocks, parts, tile_of_queries, device=device)
    lengths = torch.empty(H, C, dtype=torch.int32, device=device)
    # Scores summed over each token's query heads, which is `cluster_scores` times G; 0 past the last cluster.
    scores = torch.empty(H, T, stride, device=device)
    strides = *query.stride()[:3], centroids.stride(0), counts.stride(0), softmax_scale, softcap or 0.0
    tiles = {
        "CAPPED": softcap is not None, "G": G, "GROUP": group, "ROWS": tile_of_queries, "D": D,
        "BLOCK_D": power_of_two(D), "TILE": tile, "STAGES": STAGES, "num_warps": WARPS, **early,
    }  # fmt: skip
    _sums_kernel[(parts, H, blocks)](query, centroids, counts, peaks, sums, lengths, T, C, *strides, **tiles)
    _scores_kernel[(parts, H, blocks)](
        query, centroids, counts, peaks, sums, scores, T, C, stride, parts, *strides, PARTS=power_of_two(parts), **tiles
    )
    clusters = power_of_two(stride)
    warps = min(MOST_WARPS, max(4, clusters // CLUSTERS_A_WARP))
    # With an SM for each program, an unlimited number of registers is faster. Programs of more than FEW_WARPS warps
    # have at most REGISTERS registers per thread anyway.
    limited = {"maxnreg": REGISTERS} if warps <= FEW_WARPS and count_sms(device) < B * H else {}
    _take_kernel[(B, H)](
        scores, ends, counts, scores if thresholds is None else thresholds, lengths, T, C, stride, counts.stride(0),
        budget, least_rank(budget), KEEP=thresholds is not None, G=G, CLUSTERS=clusters,
        num_warps=warps, **limited, **early,
    )  # fmt: skip
    log_left = torch.empty(H, stride, device=device)
    used = torch.empty(H, dtype=torch.int32, device=device)
    rows = torch.empty(H, aligned(max(capacity, 1)), dtype=torch.int32, device=device)
    _list_kernel[(triton.cdiv(stride, LISTED), H)](
        lengths, counts, starts, log_left, rows, used, used if seen is None else seen,
        C, stride, counts.stride(0), starts.stride(0), rows.stride(0), capacity,
        SEEN=seen is not None, CLUSTERS=LISTED, RUN=RUN, BEFORE=BEFORE, num_warps=4, **early,
    )  # fmt: skip
    return SharedChoice(lengths, log_left, rows, used)
