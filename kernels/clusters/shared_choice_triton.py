"""`choose_together` in Triton.

After all clusters are scored for each token, one program for each head and question ranks them and takes its own. The
next kernel adds up what was taken, and the last one lists the rows.
"""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.clusters.choice_counts_triton import sum_of_three
from sparsekv.kernels.clusters.cluster_choice_triton import side_by_side
from sparsekv.kernels.clusters.token_scores_triton import token_scores
from sparsekv.kernels.clusters.types import EXPONENT_BITS, SCORE_BITS, SharedChoice, least_rank
from sparsekv.kernels.common.launch import dependent_launch
from sparsekv.kernels.common.run_rows_triton import list_rows
from sparsekv.kernels.common.tiles_triton import aligned, power_of_two, wait_for_previous_kernel

CLUSTERS_A_WARP = 512
PAIRS = tl.constexpr((EXPONENT_BITS + SCORE_BITS + 1) // 2)  # of a rank's bits
HIGHEST = tl.constexpr(2 ** (EXPONENT_BITS + SCORE_BITS) - 1)
DROPPED_BITS = tl.constexpr(23 - SCORE_BITS)  # of a score's fraction


@triton.jit
def _last_rank(rank, size, budget):
    """The highest rank such that clusters of this rank or above hold the budget; 0 if there is none. Two of its bits
    are found at a time, because each reduction makes all threads of a program wait."""
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
    """`choose_together` on a GPU; see `token_scores` for what it reads."""
    H, G, T, _ = query.shape
    C, device, early = counts.shape[1], query.device, dependent_launch(query.device)
    counts, stride = side_by_side(counts), aligned(C)
    lengths, running = torch.empty(2, H, C, dtype=torch.int32, device=device)
    scores = token_scores(query, centroids, counts, lengths, softmax_scale, softcap)
    log_left = torch.empty(H, stride, device=device)
    used = torch.empty(H, dtype=torch.int32, device=device)
    rows = torch.empty(H, aligned(max(capacity, 1)), dtype=torch.int32, device=device)
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
