"""The functions of `cluster_choice` for one query in Triton: logits and sums of their exponentials, then the choice."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.clusters.budget_choice_triton import Scored, Wanted, choose
from sparsekv.kernels.clusters.cluster_choice import ListedChoice
from sparsekv.kernels.common import tiles_triton as common
from sparsekv.kernels.common.kernel_inputs import Int8Kernel, Keys, RowScales, pair_block
from sparsekv.kernels.common.launch import (
    aligned,
    count_sms,
    dependent_launch,
    group_rows,
    num_splits,
    power_of_two,
    side_by_side,
    tile_rows,
)
from sparsekv.kernels.common.tiles_triton import pair_products, scaled_queries, scales_of

# IN_8_BITS is used for int8 centroids, MANY_CLUSTERS for more than MANY clusters that are not listed, and FEW_CLUSTERS
# for all others. Each holds tile bytes, pipeline stages, programs per SM and warps, which were fastest as measured.
MANY, FEW_CLUSTERS, MANY_CLUSTERS, IN_8_BITS = 16_384, (32_768, 2, 4, 4), (16_384, 3, 5, 4), (16_384, 3, 4, 2)


@triton.jit
def _logits_kernel(
    query, centroids, scales, channels, offsets, counts, first_row, clusters, listed, starts, logits, numbers, peaks,
    totals, used, queue, C, slots, stride, centroids_stride, counts_stride, first_stride, clusters_stride,
    softmax_scale, softcap, CAPPED: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, LISTED: tl.constexpr, SCALED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute logits of a share of a head's centroids, their maximum, and sum(count * exp(logit - maximum)).

    Also write the clusters' token counts to `numbers`, and set `used` and `queue` to 0. For listed clusters, this
    kernel writes the valid slots, up to a multiple of 16, and their first rows. `_take_kernel` writes later slots.
    """
    common.wait_for_previous_kernel(EARLY)
    part, parts, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    g, d, t = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    of_group = g < G
    known_clusters = tl.minimum(tl.load(listed + head), slots) if LISTED else C
    q = tl.load(query + (head * G + g[:, None]) * D + d, mask=of_group[:, None] & (d < D), other=0.0)
    if SCALED:
        EXACT: tl.constexpr = q.dtype == tl.float32
        q_first, q_second, shift, of_queries, offset = scaled_queries(
            q, channels + head * D, offsets + head * D, d, d < D, softmax_scale, False, GROUP, BLOCK_D
        )
        scales += head * C
        d, row_numbers = tl.arange(0, BLOCK_D // 2), D // 2
    else:
        row_numbers = D
    # With room for appended tokens, the stride between heads is larger than the size of a head's clusters.
    centroids, counts = centroids + head * centroids_stride, counts + head * counts_stride
    first_row += head * first_stride
    logits, numbers, starts = logits + head * G * stride, numbers + head * stride, starts + head * stride
    clusters += head * clusters_stride
    peak = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    if part == 0:
        tl.store(used + head, 0)
        tl.store(queue + head, 0)
    # Empty clusters follow the last cluster, up to a multiple of 16.
    first, stop = common.share(part, parts, tl.cdiv(known_clusters, 16))
    first, stop = tl.multiple_of(first * 16, 16), tl.multiple_of(stop * 16, 16)
    for at in tl.range(first, stop, TILE, num_stages=STAGES):
        slot = at + t
        inside = slot < stop
        known = inside & (slot < known_clusters)
        c = slot
        if LISTED:
            c = tl.load(clusters + slot, mask=known, other=0)
        k = tl.load(centroids + c[:, None] * row_numbers + d, mask=known[:, None] & (d < row_numbers), other=0)
        number = tl.load(counts + c, mask=known, other=0).to(tl.int32)
        tl.store(numbers + slot, number, mask=inside)
        if LISTED:
            row = tl.load(first_row + c, mask=known, other=0)
            tl.store(starts + slot, row.to(tl.int32), mask=inside)
        if SCALED:
            of_keys, _ = scales_of(tl.load(scales + c, mask=known, other=0), of_queries, 1.0)
            products = pair_products(q_first, q_second, shift, k, EXACT) * of_keys[None, :] + offset[:, None]
        else:
            products = common.dot(q, tl.trans(k)) * softmax_scale
        scores = common.capped(products, softcap, CAPPED)
        scores = tl.where(number > 0, scores, -float("inf"))
        tl.store(logits + g[:, None] * stride + slot, scores, mask=of_group[:, None] & inside)
        highest = tl.maximum(peak, tl.max(scores, 1))
        # All clusters so far may be empty.
        safe = tl.where(highest == -float("inf"), 0.0, highest)
        total = total * tl.exp(peak - safe) + tl.sum(tl.exp(scores - safe[:, None]) * number.to(tl.float32), 1)
        peak = highest
    place = (head * G + g) * parts + part
    tl.store(peaks + place, peak, mask=of_group)
    tl.store(totals + place, total, mask=of_group)


def _keys(query: torch.Tensor, centroids: Keys) -> tuple[torch.Tensor, RowScales, int]:
    """Return the centroids in the kernels' layout, their scales, and the width, in channels, of a block for one row.

    Centroids that are not int8 get dummy scales, which are never read.
    """
    if isinstance(centroids, Int8Kernel):
        words = centroids.in_words()
        return words.keys, words.scales, pair_block(query.shape[2])
    keys = side_by_side(centroids.to(query.dtype))
    return keys, RowScales(*[keys] * 4), power_of_two(query.shape[2])


def _launch(
    query: torch.Tensor, centroids: Keys, counts: torch.Tensor, scale: float,
    softcap: float | None, first_row: torch.Tensor | None = None,
    listed: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[Scored, torch.Tensor]:  # fmt: skip
    """Compute the logits of all clusters or of the listed clusters, their peaks, and the sums of their exponentials.

    The second result [H, S or more] int32 has the listed clusters' first rows. Without `listed` it is never read.
    """
    (H, G, D), C, device = query.shape, counts.shape[1], query.device
    scaled, counts = isinstance(centroids, Int8Kernel), side_by_side(counts)
    keys, scales, block = _keys(query, centroids)
    clusters, known = (counts, counts) if listed is None else listed
    first_row = counts if first_row is None else side_by_side(first_row)
    slots = clusters.shape[1]
    form = MANY_CLUSTERS if slots > MANY and listed is None else FEW_CLUSTERS
    tile, stages, programs, warps = IN_8_BITS if scaled else form
    rows = tile_rows(D, torch.int8 if scaled else query.dtype, tile)
    likely = slots if listed is None else slots // 2
    # There is at most one program for each tile, because merging the sums of fewer programs takes less time.
    programs = min(programs, triton.cdiv(H * triton.cdiv(likely, rows), count_sms(device)))
    parts = num_splits(H, slots, max(programs, 1) * count_sms(device))
    stride = aligned(slots)
    logits = torch.empty(H, G, stride, device=device)
    peaks, totals = torch.empty(2, H, G, parts, device=device)
    numbers, starts = torch.empty(2, H, stride, dtype=torch.int32, device=device)
    used, queue = torch.empty(2, H, dtype=torch.int32, device=device)
    _logits_kernel[(parts, H)](
        query.contiguous(), keys, scales.rows, scales.channels, scales.offsets, counts, first_row, clusters, known,
        starts, logits, numbers, peaks, totals, used, queue, C, slots, stride, keys.stride(0), counts.stride(0),
        first_row.stride(0), clusters.stride(0), scale, softcap or 0.0,
        CAPPED=softcap is not None, G=G, GROUP=group_rows(G), D=D, BLOCK_D=block,
        TILE=rows, STAGES=stages, LISTED=listed is not None, SCALED=scaled, num_warps=warps,
        **dependent_launch(device),
    )  # fmt: skip
    return Scored(logits, numbers, peaks, totals, used, queue, None if listed is None else known), starts


def choose_clusters_triton(
    query, centroids, counts, starts, budget, softmax_scale, softcap=None, threshold=None, seen=None
):
    """Run `choose_clusters` on a GPU; reads the centroids once and their logits once."""
    scored, _ = _launch(query, centroids, counts, softmax_scale, softcap)
    take = Wanted(starts, budget, budget if threshold is None else 0, threshold, seen=seen)
    return choose(scored, counts.shape[1], take)


def open_clusters_triton(query, centroids, counts, children, wanted, budget, softmax_scale, softcap=None):
    """Run `open_clusters` on a GPU; reads the centroids once and their logits once."""
    numbers = children.numbers.contiguous()
    scored, _ = _launch(query, centroids, counts, softmax_scale, softcap)
    take = Wanted(children.first, children.slots, budget, children=numbers, wanted=wanted, seen=children.seen)
    return choose(scored, counts.shape[1], take)


def choose_listed_triton(query, centroids, counts, first_row, listed, budget, softmax_scale, softcap=None):
    """Run `choose_listed` on a GPU; reads the listed centroids once and their logits once."""
    scored, starts = _launch(query, centroids, counts, softmax_scale, softcap, first_row, listed)
    slots = listed[0].shape[1]
    return ListedChoice(choose(scored, slots, Wanted(starts, budget, budget)), starts[:, :slots])
