"""`choose_together` in Triton.

After all clusters are scored for each token, one program for each head and question ranks them and takes its own. The
last kernel lists the rows.
"""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.clusters.cluster_choice_triton import side_by_side
from sparsekv.kernels.clusters.token_scores_triton import token_scores
from sparsekv.kernels.clusters.types import (
    EXPONENT_BITS,
    MOST_TOKENS,
    SCORE_BITS,
    TOKEN_BITS,
    SharedChoice,
    least_rank,
)
from sparsekv.kernels.common.launch import count_sms, dependent_launch
from sparsekv.kernels.common.tiles_triton import aligned, power_of_two, wait_for_previous_kernel

# Clusters of a program that lists rows, how many rows of each it writes at once, how many clusters it counts at once.
LISTED, RUN, BEFORE = 64, 16, 1024
CLUSTERS_A_WARP, MOST_WARPS = 1024, 32  # of a program that ranks
FEW_WARPS, REGISTERS = 8, 128  # two programs of so few warps fit on an SM if a thread has no more registers
BITS = tl.constexpr(EXPONENT_BITS + SCORE_BITS)  # of a rank
HIGHEST = tl.constexpr(2 ** (EXPONENT_BITS + SCORE_BITS) - 1)
DROPPED_BITS = tl.constexpr(23 - SCORE_BITS)  # of a score's fraction
SIZE_BITS, SIZES = tl.constexpr(TOKEN_BITS), tl.constexpr(MOST_TOKENS)  # below a rank


@triton.jit
def _last_rank(clusters, budget):
    """The highest rank such that clusters of this rank or above hold the budget; 0 if there is none. A cluster's rank
    is above its size in one number, because two numbers would take the registers of a second program on an SM. All of
    a head's tokens fit below the ranks, so that whatever ranks add up to leaves the sum of the sizes as it is."""
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
    """What one question takes of a head's clusters, joined to what others take."""
    question, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, CLUSTERS)
    size = tl.load(counts + head * counts_stride + c, mask=c < C, other=0).to(tl.int32)
    first, last = 0, tl.load(ends + question)
    if question > 0:
        first = tl.load(ends + question - 1)
    wait_for_previous_kernel(EARLY)
    score = tl.zeros([CLUSTERS], tl.float32)
    # Rows of scores are padded to a multiple of 16, so that four are loaded at once; what pads them has no size.
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
    """Rows that are taken of a program's clusters, after those of the clusters before, which each program counts by
    itself; and the log of how many tokens of each cluster are left."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c, t, b = part * CLUSTERS + tl.arange(0, CLUSTERS), tl.arange(0, RUN), tl.arange(0, BEFORE)
    size = tl.load(counts + head * counts_stride + c, mask=c < C, other=0).to(tl.int32)
    start = tl.load(starts + head * starts_stride + c, mask=c < C, other=0).to(tl.int32)
    wait_for_previous_kernel(EARLY)
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
    """`choose_together` on a GPU; see `token_scores` for what it reads."""
    H, G, T, _ = query.shape
    B, C, device, early = len(ends), counts.shape[1], query.device, dependent_launch(query.device)
    counts, starts, stride = side_by_side(counts), side_by_side(starts), aligned(C)
    lengths = torch.empty(H, C, dtype=torch.int32, device=device)
    scores = token_scores(query, centroids, counts, lengths, softmax_scale, softcap)
    clusters = power_of_two(stride)
    warps = min(MOST_WARPS, max(4, clusters // CLUSTERS_A_WARP))
    # Programs that have an SM each are faster with all the registers that they want; larger ones have none to spare.
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
