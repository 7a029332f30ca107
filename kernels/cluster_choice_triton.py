"""`choose_clusters` and `choose_listed` in Triton: logits and their sums over all multiprocessors, then the choice."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.budget_choice_triton import RANKS, RANKS_OF_A_HEAD, Scored, choose, open_best
from sparsekv.kernels.cluster_choice import ClusterChoice, ListedChoice
from sparsekv.kernels.launch import following, multiprocessors, programs_per_head
from sparsekv.kernels.run_rows_triton import MOST_OWN_ROWS, list_rows, search_steps, write_rows
from sparsekv.kernels.tiles_triton import aligned, capped, dot, group_rows, power_of_two, share, start, tile_rows

WARPS = 4
# Bytes of a tile, stages of the loop, programs a multiprocessor: measured, one below so many clusters and one above.
MANY, FEW_CLUSTERS, MANY_CLUSTERS = 16_384, (32_768, 2, 4), (16_384, 3, 5)
OWN_SLOTS = 256  # whose clusters are found together by the program that reads them


@triton.jit
def _logits_kernel(
    query, centroids, counts, run_starts, run_ends, first_row, clusters, starts, logits, numbers, peaks, totals,
    counted, C, stride, runs, run_starts_stride, run_ends_stride, softmax_scale, softcap, CAPPED: tl.constexpr,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, LISTED: tl.constexpr, OWN_ROWS: tl.constexpr, STEPS: tl.constexpr, SLOTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Logits of a program's share of a head's centroids, their largest, and the sum of counts times exponents."""
    start(EARLY)
    part, parts, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    g, d, t = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    of_group = g < G
    q = tl.load(query + (head * G + g[:, None]) * D + d, mask=of_group[:, None] & (d < D), other=0.0)
    centroids, counts, logits = centroids + head * C * D, counts + head * C, logits + head * G * stride
    numbers, clusters, starts = numbers + head * stride, clusters + head * stride, starts + head * stride
    peak = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    if part == 0:
        tl.store(counted + head * 2 * RANKS + tl.arange(0, 2 * RANKS), tl.zeros([2 * RANKS], tl.int32))
    used = C
    if LISTED:
        run_starts, run_ends = run_starts + head * run_starts_stride, run_ends + head * run_ends_stride
        used = tl.minimum(tl.load(run_ends + runs - 1), stride)
    # Past the last cluster come some of no token, up to the end of a row.
    filled = tl.cdiv(used, 16) if LISTED else stride // 16
    first, stop = share(part, parts, filled)
    first, stop = tl.multiple_of(first * 16, 16), tl.multiple_of(stop * 16, 16)
    if LISTED:
        empty, end = share(part, parts, stride // 16 - filled)
        for at in range((filled + empty) * 16, (filled + end) * 16, TILE):
            slot = at + t
            inside = slot < (filled + end) * 16
            tl.store(numbers + slot, tl.zeros([TILE], tl.int32), mask=inside)
            tl.store(clusters + slot, tl.zeros([TILE], tl.int32), mask=inside)
            tl.store(starts + slot, tl.zeros([TILE], tl.int32), mask=inside)
            nothing = tl.full([GROUP, TILE], -float("inf"), tl.float32)
            tl.store(logits + g[:, None] * stride + slot, nothing, mask=of_group[:, None] & inside)
        if OWN_ROWS:
            last = tl.minimum(stop, used)
            for at in range(first, last, SLOTS):
                write_rows(run_starts, run_ends, clusters, at + tl.arange(0, SLOTS), runs, last, STEPS)
            # Other threads of the program read what these have written.
            tl.debug_barrier()
    for at in tl.range(first, stop, TILE, num_stages=STAGES):
        slot = at + t
        inside = slot < stop
        known = inside & (slot < used)
        c = slot
        if LISTED:
            c = tl.load(clusters + slot, mask=known, other=0)
        k = tl.load(centroids + c[:, None] * D + d, mask=known[:, None] & (d < D), other=0.0)
        number = tl.load(counts + c, mask=known, other=0).to(tl.int32)
        tl.store(numbers + slot, number, mask=inside)
        if LISTED:
            row = tl.load(first_row + head * C + c, mask=known, other=0)
            tl.store(starts + slot, row.to(tl.int32), mask=inside)
            tl.store(clusters + slot, c, mask=inside)
        scores = capped(dot(q, tl.trans(k)) * softmax_scale, softcap, CAPPED)
        scores = tl.where(number > 0, scores, -float("inf"))
        tl.store(logits + g[:, None] * stride + slot, scores, mask=of_group[:, None] & inside)
        highest = tl.maximum(peak, tl.max(scores, 1))
        # There may be no cluster yet that has a token.
        safe = tl.where(highest == -float("inf"), 0.0, highest)
        total = total * tl.exp(peak - safe) + tl.sum(tl.exp(scores - safe[:, None]) * number.to(tl.float32), 1)
        peak = highest
    place = (head * G + g) * parts + part
    tl.store(peaks + place, peak, mask=of_group)
    tl.store(totals + place, total, mask=of_group)


def _launch(
    query: torch.Tensor, centroids: torch.Tensor, counts: torch.Tensor, slots: int, scale: float, softcap: float | None,
    first_row: torch.Tensor | None = None, runs: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[Scored, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Logits and sums of all clusters, or of those of runs: then which cluster each slot is, and its first row, too."""
    (H, G, D), C = query.shape, centroids.shape[1]
    centroids, counts = centroids.to(query.dtype).contiguous(), counts.contiguous()
    tile, stages, programs = MANY_CLUSTERS if slots > MANY and runs is None else FEW_CLUSTERS
    parts = programs_per_head(H, slots, programs * multiprocessors(query.device))
    stride = aligned(slots)
    logits = torch.empty(H, G, stride, device=query.device)
    peaks, totals = torch.empty(2, H, G, parts, device=query.device)
    numbers, clusters, starts = torch.empty(3, H, stride, dtype=torch.int32, device=query.device)
    counted = torch.empty(H, 2, RANKS_OF_A_HEAD, dtype=torch.int32, device=query.device)
    run_starts, run_ends = (counts, counts) if runs is None else runs
    own_rows = slots <= parts * MOST_OWN_ROWS
    if runs is not None and not own_rows:
        list_rows(*runs, clusters, slots)
    _logits_kernel[(parts, H)](
        query.contiguous(), centroids, counts, run_starts, run_ends, counts if first_row is None else first_row,
        clusters, starts, logits, numbers, peaks, totals, counted, C, stride, run_ends.shape[1], run_starts.stride(0),
        run_ends.stride(0), scale, softcap or 0.0,
        CAPPED=softcap is not None, G=G, GROUP=group_rows(G), D=D, BLOCK_D=power_of_two(D),
        TILE=tile_rows(D, query.dtype, tile), STAGES=stages, LISTED=runs is not None, OWN_ROWS=own_rows,
        STEPS=search_steps(run_ends.shape[1]), SLOTS=OWN_SLOTS, num_warps=WARPS, **following(query.device),
    )  # fmt: skip
    return Scored(logits, numbers, peaks, totals, counted), clusters, starts


def choose_clusters_triton(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ClusterChoice:
    """`choose_clusters` on a GPU; reads the centroids once, their logits once more."""
    scored, _, _ = _launch(query, centroids, counts, counts.shape[1], softmax_scale, softcap)
    return choose(scored, counts.shape[1], budget)


def open_clusters_triton(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    children: torch.Tensor,
    wanted: int,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ClusterChoice:
    """`open_clusters` on a GPU; reads the centroids once, their logits once more."""
    scored, _, _ = _launch(query, centroids, counts, counts.shape[1], softmax_scale, softcap)
    return open_best(scored, children, wanted, budget)


def keep_clusters_triton(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    threshold: float,
    softmax_scale: float,
    softcap: float | None = None,
) -> ClusterChoice:
    """`keep_clusters` on a GPU; reads the centroids once, their logits once more."""
    scored, _, _ = _launch(query, centroids, counts, counts.shape[1], softmax_scale, softcap)
    return choose(scored, counts.shape[1], 0, threshold=threshold)


def choose_listed_triton(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    first_row: torch.Tensor,
    runs: tuple[torch.Tensor, torch.Tensor],
    slots: int,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ListedChoice:
    """`choose_listed` on a GPU; reads the centroids of the runs once."""
    scored, clusters, starts = _launch(query, centroids, counts, slots, softmax_scale, softcap, first_row, runs)
    return ListedChoice(choose(scored, slots, budget), clusters, starts[:, :slots])
