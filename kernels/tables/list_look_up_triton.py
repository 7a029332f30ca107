"""The first kernel of `rank_tokens_triton`: lists of the nearest centroids, and sums over the exact keys."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common.launch import dependent_launch
from sparsekv.kernels.common.tiles_triton import (
    LOG2_E,
    capped,
    dot,
    group_rows,
    power_of_two,
    share,
    tile_rows,
    wait_for_previous_kernel,
)
from sparsekv.kernels.tables.list_codes import ListCodes
from sparsekv.kernels.tables.types import ExactKeys

# Small tiles and one stage: with more shared memory each, fewer programs could wait for memory at the same time.
EXACT_PROGRAMS, TILE_BYTES, STAGES, WARPS = 4, 8192, 1, 4


@dataclass(frozen=True)
class FoundLists:
    """What is known of each query before the keys' codes are read.

    lists [H, G, m] int32, indices of the nearest centroids' lists among all heads'; slopes and floors [H, G, m] of the
    logit of a code; peaks and totals [H, G, sums], largest logit / ln 2 and sum of exponentials: first of the tiles of
    keys, which are still to be written, then of the exact keys.
    """

    lists: torch.Tensor
    slopes: torch.Tensor
    floors: torch.Tensor
    peaks: torch.Tensor
    totals: torch.Tensor


@triton.jit
def add_exact(
    query, exact_keys, exact_count, sinks, peaks, totals, head, which, sums, exact_rows, exact_stride, softmax_scale,
    softcap, CAPPED: tl.constexpr, COUNTED: tl.constexpr, HAS_SINKS: tl.constexpr, G: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, EXACT_PROGRAMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write peak logit / ln 2 and sum of exponentials of a program's share of the exact keys, after those of tiles; the
    first program's share has the learned sinks."""
    g, d, t = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    of_group = g < G
    q = tl.load(query + (head * G + g[:, None]) * D + d, mask=of_group[:, None] & (d < D), other=0.0)
    peak = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head * G + g, mask=of_group, other=0.0).to(tl.float32) * LOG2_E
        peak = tl.where(which == 0, sink, peak)
        total = tl.where(which == 0, 1.0, total)
    rows = exact_rows
    if COUNTED:
        rows = tl.minimum(rows, tl.load(exact_count))
    first, stop = share(which, EXACT_PROGRAMS, rows)
    for at in range(first, stop, TILE):
        inside = at + t < stop
        place = exact_keys + head * exact_stride + (at + t)[:, None] * D + d
        k = tl.load(place, mask=inside[:, None] & (d < D), other=0.0)
        logits = capped(dot(q, tl.trans(k)) * softmax_scale, softcap, CAPPED) * LOG2_E
        logits = tl.where(inside, logits, -float("inf"))
        highest = tl.maximum(peak, tl.max(logits, 1))
        total = total * tl.exp2(peak - highest) + tl.sum(tl.exp2(logits - highest[:, None]), 1)
        peak = highest
    place = (head * G + g) * sums + sums - EXACT_PROGRAMS + which
    tl.store(peaks + place, peak, mask=of_group)
    tl.store(totals + place, total, mask=of_group)


@triton.jit(do_not_specialize=["exact_rows"])
def _look_up_kernel(
    query, centroids, channels, origins, steps, part_weights, exact_keys, exact_count, sinks,
    lists, slopes, floors, peaks, totals,
    sums, exact_rows, exact_stride, softmax_scale, softcap, CAPPED: tl.constexpr,
    COUNTED: tl.constexpr, HAS_SINKS: tl.constexpr, REACHING: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    FEW: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, EXACT_PROGRAMS: tl.constexpr,
    TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """For a subspace of a head, the list of each query's nearest centroid, and slope and floor of a code's logit.

    The last EXACT_PROGRAMS programs of a head attend to the exact keys instead.
    """
    wait_for_previous_kernel(EARLY)
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if part >= PARTS:
        add_exact(
            query, exact_keys, exact_count, sinks, peaks, totals, head, part - PARTS, sums, exact_rows, exact_stride,
            softmax_scale, softcap, CAPPED, COUNTED, HAS_SINKS, G, GROUP, D, BLOCK_D, EXACT_PROGRAMS, TILE,
        )  # fmt: skip
    else:
        g, c, j = tl.arange(0, FEW), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_SIZE)
        channel = tl.load(channels + part * SIZE + j, mask=j < SIZE, other=0)
        of_query = (g < G)[:, None] & (j < SIZE)
        q = tl.load(query + (head * G + g[:, None]) * D + channel, mask=of_query, other=0.0).to(tl.float32)
        place = ((head * PARTS + part) * C + c[:, None]) * SIZE + j
        centroid = tl.load(centroids + place, mask=(c < C)[:, None] & (j < SIZE), other=0.0)
        # Read for all lists: reading only the nearest one's would wait for memory once more.
        place = (head * PARTS + part) * C + c
        step, origin = tl.load(steps + place, mask=c < C, other=0.0), tl.load(origins + place, mask=c < C, other=0.0)
        products = tl.sum(q[:, None, :] * centroid[None, :, :], 2)
        # If products are NaN, the index of the largest could be past the last list.
        known = (c < C) & (products > -float("inf"))
        best, nearest = tl.max(tl.where(known, products, -float("inf")), 1, return_indices=True)
        found = (head * PARTS + part) * C + nearest
        at_nearest = nearest[:, None] == c
        reach = tl.load(part_weights + head * PARTS + part) * softmax_scale
        reach = reach * (tl.maximum(best, 0.0) if REACHING else tl.full([FEW], 1.0, tl.float32))
        place = (head * G + g) * PARTS + part
        tl.store(lists + place, found.to(tl.int32), mask=g < G)
        tl.store(slopes + place, reach * tl.sum(tl.where(at_nearest, step, 0.0), 1), mask=g < G)
        tl.store(floors + place, reach * tl.sum(tl.where(at_nearest, origin, 0.0), 1), mask=g < G)


def look_up_lists(
    query: torch.Tensor,
    lists: ListCodes,
    exact: ExactKeys,
    tiles: int,
    softmax_scale: float,
    softcap: float | None,
) -> FoundLists:
    """The list of each subspace for queries [H, G, D], with room for the sums over `tiles` tiles of keys."""
    (H, G, D), (_, m, C, size), device = query.shape, lists.centroids.shape, query.device
    query, sums = query.contiguous(), tiles + EXACT_PROGRAMS
    found = torch.empty(H, G, m, dtype=torch.int32, device=device)
    slopes, floors = torch.empty(2, H, G, m, device=device)
    peaks, totals = torch.empty(2, H, G, sums, device=device)
    _look_up_kernel[(m + EXACT_PROGRAMS, H)](
        query, lists.centroids, lists.channels, lists.origins, lists.steps, lists.weights, exact.keys,
        found if exact.count is None else exact.count, slopes if exact.sinks is None else exact.sinks.contiguous(),
        found, slopes, floors, peaks, totals,
        sums, exact.keys.shape[1], exact.keys.stride(0), softmax_scale, softcap or 0.0, CAPPED=softcap is not None,
        COUNTED=exact.count is not None, HAS_SINKS=exact.sinks is not None, REACHING=lists.reaching, G=G,
        GROUP=group_rows(G), FEW=power_of_two(G), PARTS=m, C=C, BLOCK_C=power_of_two(C), SIZE=size,
        BLOCK_SIZE=power_of_two(size), D=D, BLOCK_D=power_of_two(D),
        EXACT_PROGRAMS=EXACT_PROGRAMS, TILE=tile_rows(D, query.dtype, TILE_BYTES), num_warps=WARPS, num_stages=STAGES,
        # Threads that hold the same sum would round it differently with fused multiply-adds, and store different ones.
        enable_fp_fusion=False, **dependent_launch(device),
    )  # fmt: skip
    return FoundLists(found, slopes, floors, peaks, totals)
