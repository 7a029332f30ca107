"""`shared_decode` in Triton: partial softmaxes over shares of what is shared, one over own rows, and their merging.

A program holds the queries of as many tokens as fit on an SM, so that tensor cores multiply all of them with each row.
Logits are in units of log 2.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sparsekv.kernels.attention.running_softmax_triton import add_scaled_tile, add_tile, store_partial, tile_logits
from sparsekv.kernels.attention.shared_attention import OwnRows
from sparsekv.kernels.attention.types import Centroids, RowScales, RunRows
from sparsekv.kernels.common.launch import count_sms, dependent_launch, num_splits
from sparsekv.kernels.common.tiles_triton import (
    LARGEST_HALF,
    LOG2_E,
    capped,
    channel_scaled,
    dot,
    floats_of,
    group_rows,
    power_of_two,
    share,
    tile_rows,
    wait_for_previous_kernel,
)

MOST_ROWS, QUERY_NUMBERS = 64, 8192  # of a program: of its queries, whose outputs are in registers
TILE_BYTES, STAGES, WARPS, PROGRAMS_PER_SM = 16_384, 3, 4, 2
# Rows in 8 bits go through registers, which a stage in shared memory only delays.
STAGES_OF_8_BITS, PROGRAMS_OF_FEW, FEW = 1, 3, 2048  # rows of an SM
OWN_TILE, MERGED_COLUMNS = 32, 128


# These grow as a model decodes, and must not make Triton recompile.
@triton.jit(do_not_specialize=["R", "exact_rows", "capacity", "centroids"])
def _shared_kernel(
    query, keys, values, key_scales, value_scales, channel_scales, channel_offsets, units, rows, rows_used,
    exact_keys, exact_values, stand_keys, stand_counts, stand_values, peaks, totals, outputs,
    R, q_head, q_group, q_token, head_stride, row_stride, scales_stride, rows_stride, capacity,
    exact_rows, exact_stride, centroids, counts_stride, stand_keys_stride, stand_values_stride, softmax_scale, softcap,
    CAPPED: tl.constexpr, ROWS_USED: tl.constexpr, SCALED: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The softmax of some queries over one of equal shares of a head's centroids, exact rows and chosen rows."""
    wait_for_previous_kernel(EARLY)
    part, parts, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    r, d, t = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    in_row = d < D
    place = query + head * q_head + (r % G)[:, None] * q_group + (r // G)[:, None] * q_token
    q = tl.load(place + d, mask=(r < R)[:, None] & in_row, other=0.0)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output, scale = tl.zeros([ROWS, BLOCK_D], tl.float32), softmax_scale * LOG2_E
    chosen = capacity
    if ROWS_USED:
        chosen = tl.minimum(tl.load(rows_used + head), capacity)
    # The head's work as one sequence, so that most programs have one kind of it.
    first, last = share(part, parts, centroids + exact_rows + chosen)

    stand_keys, stand_values = stand_keys + head * stand_keys_stride, stand_values + head * stand_values_stride
    stand_counts += head * counts_stride
    stop = tl.minimum(last, centroids)
    for at in tl.range(first, stop, TILE, num_stages=STAGES):
        c = at + t
        inside = c < stop
        mask = inside[:, None] & in_row
        k = tl.load(stand_keys + c[:, None] * D + d, mask=mask, other=0.0)
        v = tl.load(stand_values + c[:, None] * D + d, mask=mask, other=0.0)
        count = tl.load(stand_counts + c, mask=inside, other=-float("inf")) * LOG2_E
        logits = tile_logits(dot(q, tl.trans(k.to(q.dtype))), count, scale, softmax_scale, softcap, CAPPED)
        peak, total, output = add_tile(peak, total, output, logits, v)

    first, last = first - centroids, last - centroids
    exact_keys, exact_values = exact_keys + head * exact_stride, exact_values + head * exact_stride
    stop = tl.minimum(last, exact_rows)
    for at in tl.range(tl.maximum(first, 0), stop, TILE, num_stages=STAGES):
        inside = at + t < stop
        mask = inside[:, None] & in_row
        k = tl.load(exact_keys + (at + t)[:, None] * D + d, mask=mask, other=0.0)
        v = tl.load(exact_values + (at + t)[:, None] * D + d, mask=mask, other=0.0)
        logits = tile_logits(
            dot(q, tl.trans(k)), tl.where(inside, 0.0, -float("inf")), scale, softmax_scale, softcap, CAPPED
        )
        peak, total, output = add_tile(peak, total, output, logits, v)

    first, last = first - exact_rows, last - exact_rows
    keys, values, rows = keys + head * head_stride, values + head * head_stride, rows + head * rows_stride
    if SCALED:
        EXACT: tl.constexpr = q.dtype == tl.float32
        channels, offsets = channel_scales + head * D, channel_offsets + head * D
        q, largest, offset = channel_scaled(q, channels, offsets, d, in_row, softmax_scale)
        key_scales, value_scales = key_scales + head * scales_stride, value_scales + head * scales_stride
        # Values are added up in a head's unit.
        unit = tl.load(units + head)
        output = output / unit
    for at in tl.range(tl.maximum(first, 0), last, TILE, num_stages=STAGES):
        inside = at + t < last
        row = tl.load(rows + at + t, mask=inside, other=0)
        mask, bias = inside[:, None] & in_row, tl.where(inside, 0.0, -float("inf"))
        k = tl.load(keys + row[:, None] * row_stride + d, mask=mask, other=0)
        v = tl.load(values + row[:, None] * row_stride + d, mask=mask, other=0)
        if SCALED:
            of_keys = tl.load(key_scales + row, mask=inside, other=0.0).to(tl.float32)
            of_values = tl.load(value_scales + row, mask=inside, other=0.0).to(tl.float32) / unit
            of_values = tl.minimum(of_values, LARGEST_HALF)
            products = dot(q, tl.trans(floats_of(k, EXACT))) * largest[:, None] * of_keys[None, :] + offset[:, None]
            logits = capped(products, softcap, CAPPED) * LOG2_E + bias
            peak, total, output = add_scaled_tile(peak, total, output, logits, floats_of(v, EXACT), of_values)
        else:
            logits = tile_logits(dot(q, tl.trans(k)), bias, scale, softmax_scale, softcap, CAPPED)
            peak, total, output = add_tile(peak, total, output, logits, v)
    if SCALED:
        output = output * unit
    store_partial(peaks, totals, outputs, part, parts + 1, head, r, R, d, peak, total, output, D)


@triton.jit(do_not_specialize=["R"])
def _own_kernel(
    query, keys, values, slots, starts, ends, peaks, totals, outputs,
    R, q_head, q_group, q_token, slot_stride, head_stride, parts, softmax_scale, softcap,
    CAPPED: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The softmax of one token's queries over its sequence's rows, as the last of the parts."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    token, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    g, d, t = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    in_row = d < D
    q = tl.load(
        query + head * q_head + g[:, None] * q_group + token * q_token + d, mask=(g < G)[:, None] & in_row, other=0.0
    )
    of_slot = tl.load(slots + token) * slot_stride + head * head_stride
    keys, values = keys + of_slot, values + of_slot
    peak = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    output, scale = tl.zeros([GROUP, BLOCK_D], tl.float32), softmax_scale * LOG2_E
    stop = tl.load(ends + token).to(tl.int32)
    for at in range(tl.load(starts + token).to(tl.int32), stop, TILE):
        inside = at + t < stop
        mask = inside[:, None] & in_row
        k = tl.load(keys + (at + t)[:, None] * D + d, mask=mask, other=0.0)
        v = tl.load(values + (at + t)[:, None] * D + d, mask=mask, other=0.0)
        logits = tile_logits(
            dot(q, tl.trans(k)), tl.where(inside, 0.0, -float("inf")), scale, softmax_scale, softcap, CAPPED
        )
        peak, total, output = add_tile(peak, total, output, logits, v)
    r = tl.where(g < G, token * G + g, R)
    # The kernel before this one is `_shared_kernel`: what is read above was written before it, but merging has to
    # wait for both.
    if EARLY:
        tl.extra.cuda.gdc_wait()
    store_partial(peaks, totals, outputs, parts - 1, parts, head, r, R, d, peak, total, output, D)


@triton.jit(do_not_specialize=["R", "parts"])
def _merge_kernel(
    peaks, totals, outputs, sink_logits, merged, R, parts, out_head, out_group, out_token,
    HAS_SINKS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    r, head = tl.program_id(0), tl.program_id(2).to(tl.int64)
    d, part = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PARTS)
    place = (head * parts + part) * R + r
    part_peak = tl.load(peaks + place, mask=part < parts, other=-float("inf"))
    part_total = tl.load(totals + place, mask=part < parts, other=0.0)
    each = tl.load(outputs + place[:, None] * D + d, mask=(part < parts)[:, None] & (d < D), other=0.0)
    peak = tl.max(part_peak, 0)
    if HAS_SINKS:
        sink = tl.load(sink_logits + head * G + r % G).to(tl.float32) * LOG2_E
        peak = tl.maximum(peak, sink)
    weights = tl.exp2(part_peak - peak)
    total = tl.sum(part_total * weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - peak)
    output = tl.sum(each * weights[:, None], 0) / total
    tl.store(merged + head * out_head + (r % G) * out_group + (r // G) * out_token + d, output, mask=d < D)


def _no_centroids(query: torch.Tensor) -> Centroids:
    """None, of no rows that anything reads."""
    nothing = query.new_empty(len(query), 0, query.shape[3])
    return Centroids(nothing, nothing, nothing[..., 0])


def _adjacent(rows: torch.Tensor) -> torch.Tensor:
    """The same with each head's rows contiguous."""
    return rows if rows[0].is_contiguous() else rows.contiguous()


def shared_decode_triton(
    query: torch.Tensor,
    runs: RunRows,
    exact: tuple[torch.Tensor, torch.Tensor],
    stand_ins: Sequence[Centroids],
    own: OwnRows,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """`shared_decode` on a GPU. Allocates float32 outputs [Hk, parts, B G, D]: two tiles of queries an SM where there
    are fewer queries, otherwise up to nine times as many as there are."""
    assert len(stand_ins) <= 1
    for keys, values in ((runs.keys, runs.values), exact, (own.keys, own.values)):
        assert keys.stride() == values.stride() or len(keys) == 1
    (H, G, B, D), device, early = query.shape, query.device, dependent_launch(query.device)
    query = query if query.stride(3) == 1 else query.contiguous()
    R, E, BLOCK_D = B * G, exact[0].shape[1], power_of_two(D)
    stands = stand_ins[0] if stand_ins else _no_centroids(query)
    centroids, stood = _adjacent(stands.keys), _adjacent(stands.values)
    C = centroids.shape[1]
    rows_of_tile = max(16, min(MOST_ROWS, QUERY_NUMBERS // BLOCK_D, power_of_two(R)))
    blocks = triton.cdiv(R, rows_of_tile)
    rows, in_8_bits = C + E + runs.capacity, runs.scales is not None
    few = in_8_bits and H * blocks * rows < FEW * count_sms(device)
    at_once = (PROGRAMS_OF_FEW if few else PROGRAMS_PER_SM) * count_sms(device)
    parts = 1 + num_splits(H * blocks, rows, at_once, grain=10)
    scales = runs.scales or RowScales(*[query] * 5)
    peaks, totals = torch.empty(2, H, parts, R, device=device)
    outputs = torch.empty(H, parts, R, D, device=device)
    merged = torch.empty(B, H, G, D, dtype=query.dtype, device=device).permute(1, 2, 0, 3)
    tile, strides = tile_rows(D, query.dtype, TILE_BYTES), query.stride()[:3]
    same = {"CAPPED": softcap is not None, "G": G, "D": D, "BLOCK_D": BLOCK_D, **early}
    _shared_kernel[(parts - 1, H, blocks)](
        query, runs.keys, runs.values, scales.keys, scales.values, scales.channels, scales.offsets, scales.units,
        runs.starts, query if runs.used is None else runs.used, *exact,
        centroids, stands.log_counts, stood, peaks, totals, outputs,
        R, *strides, *runs.keys.stride()[:2], scales.keys.stride(0), runs.starts.stride(0), runs.capacity,
        E, exact[0].stride(0),
        C, stands.log_counts.stride(0), centroids.stride(0), stood.stride(0), softmax_scale, softcap or 0.0,
        ROWS_USED=runs.used is not None, SCALED=in_8_bits,
        ROWS=rows_of_tile, TILE=tile, STAGES=STAGES_OF_8_BITS if in_8_bits else STAGES, num_warps=WARPS, **same,
    )  # fmt: skip
    _own_kernel[(B, H)](
        query, own.keys, own.values, own.slots, own.first, own.used, peaks, totals, outputs,
        R, *strides, *own.keys.stride()[:2], parts, softmax_scale, softcap or 0.0,
        GROUP=group_rows(G), TILE=OWN_TILE, num_warps=4, **same,
    )  # fmt: skip
    # Only the first axis of a grid may be longer than 65,535.
    _merge_kernel[(R, triton.cdiv(D, MERGED_COLUMNS), H)](
        peaks, totals, outputs, peaks if sink_logits is None else sink_logits.contiguous(), merged, R, parts,
        *merged.stride()[:3], HAS_SINKS=sink_logits is not None, G=G, D=D, PARTS=power_of_two(parts),
        COLUMNS=MERGED_COLUMNS, num_warps=4, **early,
    )  # fmt: skip
    return merged
