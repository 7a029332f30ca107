"""`shared_decode` in Triton.

The first kernel computes partial softmaxes over shares of the shared rows. The second kernel computes partial softmaxes
over each token's own rows. The third kernel merges all partial softmaxes. A program holds the queries of as many tokens
as fit on an SM, so that tensor cores multiply all of them with each row. Logits are in units of log 2.

For many queries and exact rows, FlashAttention-3 computes the partial softmax over the exact rows, if it is installed.
"""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.attention import flash_attention as flash
from sparsekv.kernels.attention import running_softmax_triton as softmax
from sparsekv.kernels.common import tiles_triton as common
from sparsekv.kernels.common.kernel_inputs import Centroids
from sparsekv.kernels.common.launch import (
    count_sms,
    dependent_launch,
    group_rows,
    have_equal_strides,
    num_splits,
    power_of_two,
    side_by_side,
    tile_rows,
    unit_stride,
)
from sparsekv.kernels.common.tiles_triton import LOG2_E, from_pairs, in_pairs, load_pairs, scaled_queries

LOGSUMEXP_TILE_BYTES, LOGSUMEXP_WARPS = 16_384, 4


@triton.jit
def _add_keys(
    peak, total, q, keys, first, stop, t, d, scale, softmax_scale, softcap,
    CAPPED: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the keys from `first` up to `stop` to the running maximum and sum of exponentials [GROUP]; return both.

    `scale` is the softmax scale in units of log 2.
    """
    for at in range(first, stop, TILE):
        inside = at + t < stop
        k = tl.load(keys + (at + t)[:, None] * D + d, mask=inside[:, None] & (d < D), other=0.0)
        bias = tl.where(inside, 0.0, -float("inf"))
        logits = softmax.tile_logits(common.dot(q, tl.trans(k)), bias, scale, softmax_scale, softcap, CAPPED)
        peak, weights, shrink = common.tile_weights(peak, logits)
        total = total * shrink + tl.sum(weights, 1)
    return peak, total


@triton.jit(do_not_specialize=["E"])
def _logsumexp_kernel(
    query, keys, own_keys, slots, starts, ends, sink_logits, totals,
    E, q_head, q_group, q_token, key_stride, slot_stride, own_stride, softmax_scale, softcap,
    CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    common.wait_for_previous_kernel(EARLY)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    g, d, t = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    place = query + head * q_head + g[:, None] * q_group + token * q_token
    q = tl.load(place + d, mask=(g < G)[:, None] & (d < D), other=0.0)
    peak, total = tl.full([GROUP], -float("inf"), tl.float32), tl.zeros([GROUP], tl.float32)
    if HAS_SINKS:
        peak = tl.load(sink_logits + head * G + g, mask=g < G, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    scale = softmax_scale * LOG2_E
    peak, total = _add_keys(
        peak, total, q, keys + head * key_stride, 0, E, t, d, scale, softmax_scale, softcap, CAPPED, D, TILE
    )
    own = own_keys + tl.load(slots + token) * slot_stride + head * own_stride
    first, stop = tl.load(starts + token).to(tl.int32), tl.load(ends + token).to(tl.int32)
    peak, total = _add_keys(peak, total, q, own, first, stop, t, d, scale, softmax_scale, softcap, CAPPED, D, TILE)
    result = (peak + tl.log2(total)) / LOG2_E
    tl.store(totals + (head * G + g) * tl.num_programs(0) + token, result, mask=g < G)


def shared_logsumexp_triton(query, keys, own, softmax_scale, softcap=None, sink_logits=None):
    """Run `shared_logsumexp` on a GPU; allocates only the result."""
    (H, G, B, D), device = query.shape, query.device
    query, totals = unit_stride(query), torch.empty(H, G, B, device=device)
    _logsumexp_kernel[(B, H)](
        query, keys, own.keys, own.slots, own.first, own.used,
        query if sink_logits is None else sink_logits.contiguous(), totals,
        keys.shape[1], *query.stride()[:3], keys.stride(0), *own.keys.stride()[:2], softmax_scale, softcap or 0.0,
        CAPPED=softcap is not None, HAS_SINKS=sink_logits is not None, G=G, GROUP=group_rows(G), D=D,
        BLOCK_D=power_of_two(D), TILE=tile_rows(D, query.dtype, LOGSUMEXP_TILE_BYTES), num_warps=LOGSUMEXP_WARPS,
        **dependent_launch(device),
    )  # fmt: skip
    return totals


MOST_ROWS, QUERY_NUMBERS = 64, 8192  # most query rows of a program, and most elements of them: outputs are in registers
TILE_BYTES, WARPS, PROGRAMS_PER_SM = 16_384, 4, 2
# Pipeline stages. A tile of chosen rows can be loaded only after the row indices. With five stages it is prefetched two
# iterations ahead.
STAGES, ROW_STAGES = 3, 5
OWN_TILE, MERGED_COLUMNS = 32, 128
FEWEST_OF_SHARE = 256  # fewest rows of a program if FlashAttention-3 takes the exact rows, which leaves few rows here


# These sizes grow as a model decodes, and must not make Triton recompile.
@triton.jit(do_not_specialize=["R", "exact_rows", "capacity", "centroids"])
def _shared_kernel(
    query, keys, values, row_scales, channel_scales, channel_offsets, units, rows, rows_used,
    exact_keys, exact_values, stand_keys, stand_counts, stand_values, peaks, totals, outputs,
    R, q_head, q_group, q_token, head_stride, row_stride, scales_stride, rows_stride, capacity,
    exact_rows, exact_stride, centroids, counts_stride, stand_keys_stride, stand_values_stride, softmax_scale, softcap,
    CAPPED: tl.constexpr, ROWS_USED: tl.constexpr, SCALED: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, ROW_STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a partial softmax of some queries over an equal share of a head's centroids, exact and chosen rows."""
    common.wait_for_previous_kernel(EARLY)
    part, parts, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    r, d, t = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    in_row = d < D
    place = query + head * q_head + (r % G)[:, None] * q_group + (r // G).to(tl.int64)[:, None] * q_token
    q = tl.load(place + d, mask=(r < R)[:, None] & in_row, other=0.0)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output, scale = tl.zeros([ROWS, BLOCK_D], tl.float32), softmax_scale * LOG2_E
    chosen = capacity
    if ROWS_USED:
        chosen = tl.minimum(tl.load(rows_used + head), capacity)
    # A head's work is one sequence of centroids, exact rows and chosen rows, so that most programs read only one kind.
    first, last = common.share(part, parts, centroids + exact_rows + chosen)

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
        logits = softmax.tile_logits(
            common.dot(q, tl.trans(k.to(q.dtype))), count, scale, softmax_scale, softcap, CAPPED
        )
        peak, total, output = softmax.add_tile(peak, total, output, logits, v)

    first, last = first - centroids, last - centroids
    exact_keys, exact_values = exact_keys + head * exact_stride, exact_values + head * exact_stride
    stop = tl.minimum(last, exact_rows)
    for at in tl.range(tl.maximum(first, 0), stop, TILE, num_stages=STAGES):
        inside = at + t < stop
        mask = inside[:, None] & in_row
        k = tl.load(exact_keys + (at + t)[:, None] * D + d, mask=mask, other=0.0)
        v = tl.load(exact_values + (at + t)[:, None] * D + d, mask=mask, other=0.0)
        logits = softmax.tile_logits(
            common.dot(q, tl.trans(k)), tl.where(inside, 0.0, -float("inf")), scale, softmax_scale, softcap, CAPPED
        )
        peak, total, output = softmax.add_tile(peak, total, output, logits, v)

    first, last = first - exact_rows, last - exact_rows
    keys, values, rows = keys + head * head_stride, values + head * head_stride, rows + head * rows_stride
    if SCALED:
        EXACT: tl.constexpr = q.dtype == tl.float32
        channels, offsets = channel_scales + head * D, channel_offsets + head * D
        q_first, q_second, shift, of_queries, offset = scaled_queries(
            q, channels, offsets, d, in_row, softmax_scale if CAPPED else scale, True, ROWS, BLOCK_D
        )
        row_scales += head * scales_stride
        # Outputs are accumulated in multiples of the head's unit (`RowScales.units`).
        unit = tl.load(units + head)
        first_output, second_output = in_pairs(output / unit, ROWS, BLOCK_D)
        d = tl.arange(0, BLOCK_D // 2)
        in_row = d < D // 2
    for at in tl.range(tl.maximum(first, 0), last, TILE, num_stages=ROW_STAGES):
        inside = at + t < last
        row = tl.load(rows + at + t, mask=inside, other=0)
        stored = row[:, None] * row_stride + d
        if SCALED:
            # Slots past the end read row 0, whose numbers are finite. The weights of these slots are zero.
            k, v = load_pairs(keys, stored, in_row, D == BLOCK_D), load_pairs(values, stored, in_row, D == BLOCK_D)
            words = tl.load(row_scales + row)
            peak, total, first_output, second_output = softmax.add_pairs(
                peak, total, first_output, second_output, q_first, q_second, shift, of_queries, offset, k, v, words,
                inside, unit, softcap, CAPPED, True, EXACT,
            )  # fmt: skip
        else:
            mask, bias = inside[:, None] & in_row, tl.where(inside, 0.0, -float("inf"))
            k = tl.load(keys + stored, mask=mask, other=0)
            v = tl.load(values + stored, mask=mask, other=0)
            logits = softmax.tile_logits(common.dot(q, tl.trans(k)), bias, scale, softmax_scale, softcap, CAPPED)
            peak, total, output = softmax.add_tile(peak, total, output, logits, v)
    if SCALED:
        output = from_pairs(first_output, second_output, ROWS, BLOCK_D) * unit
        d = tl.arange(0, BLOCK_D)
    softmax.store_partial(peaks, totals, outputs, part, parts + 1, head, r, R, d, peak, total, output, D)


@triton.jit(do_not_specialize=["R", "parts", "beside_token", "beside_head"])
def _own_kernel(
    query, keys, values, slots, starts, ends, beside, beside_logsumexp, peaks, totals, outputs,
    R, q_head, q_group, q_token, slot_stride, head_stride, beside_head, beside_token, parts, softmax_scale, softcap,
    BESIDE: tl.constexpr, CAPPED: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the partial softmax of one token's queries over its own sequence's rows; write it as the last part.

    With BESIDE, the softmax over other rows is merged into the last part. The outputs over the other rows are `beside`,
    and their log-sum-exps [H, G, B] are `beside_logsumexp`.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
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
        logits = softmax.tile_logits(
            common.dot(q, tl.trans(k)), tl.where(inside, 0.0, -float("inf")), scale, softmax_scale, softcap, CAPPED
        )
        peak, total, output = softmax.add_tile(peak, total, output, logits, v)
    r = tl.where(g < G, token * G + g, R)
    # All inputs above were written before the previous kernel started, which is `_shared_kernel` or FlashAttention-3.
    # The wait is needed for the results of the latter, and because the merging kernel waits only for this kernel.
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if BESIDE:
        of_beside = beside + head * beside_head + token * beside_token + g[:, None] * D + d
        other = tl.load(of_beside, mask=(g < G)[:, None] & in_row, other=0.0).to(tl.float32)
        log_total = beside_logsumexp + (head * G + g) * tl.num_programs(0) + token
        other_peak = tl.load(log_total, mask=g < G, other=0.0) * LOG2_E
        highest = tl.maximum(peak, other_peak)
        shrink, weight = tl.exp2(peak - highest), tl.exp2(other_peak - highest)
        peak, total = highest, total * shrink + weight
        output = output * shrink[:, None] + other * weight[:, None]
    softmax.store_partial(peaks, totals, outputs, parts - 1, parts, head, r, R, d, peak, total, output, D)


def shared_decode_triton(query, runs, exact, centroids, own, softmax_scale, softcap=None, sink_logits=None):
    """Run `shared_decode` on a GPU.

    Allocates float32 partial outputs [Hk, parts, B G, D], where `parts` is the number of programs that share the rows
    of a head. With few queries, the partial outputs have the size of about two tiles of queries per SM. With more
    queries, they have up to nine times as many elements as the queries.
    """
    assert len(centroids) <= 1
    assert all(have_equal_strides(*pair) for pair in ((runs.keys, runs.values), exact, (own.keys, own.values)))
    (H, G, B, D), device, early = query.shape, query.device, dependent_launch(query.device)
    query, none = unit_stride(query), query.new_empty(H, 0, D)
    beside = query, query  # never read
    if by_flash := flash.takes_rows(query, exact[0], softcap):
        beside = flash.partial_attention(query, exact[0], exact[1], softmax_scale, softcap)
        exact = none, none
    R, E, BLOCK_D = B * G, exact[0].shape[1], softmax.block_of(runs)
    stands = centroids[0] if centroids else Centroids(none, none, none[..., 0])
    centres, stood = side_by_side(stands.keys), side_by_side(stands.values)
    C = centres.shape[1]
    rows_of_tile = max(16, min(MOST_ROWS, QUERY_NUMBERS // BLOCK_D, power_of_two(R)))
    blocks = triton.cdiv(R, rows_of_tile)
    rows = C + E + runs.capacity
    shares = num_splits(H * blocks, rows, PROGRAMS_PER_SM * count_sms(device), grain=10)
    if by_flash:
        shares = min(shares, triton.cdiv(rows, FEWEST_OF_SHARE))
    parts = shares + 1
    keys, stored, scales = softmax.in_words(runs)
    peaks, totals = torch.empty(2, H, parts, R, device=device)
    outputs = torch.empty(H, parts, R, D, device=device)
    merged = torch.empty(B, H, G, D, dtype=query.dtype, device=device).permute(1, 2, 0, 3)
    tile, strides = tile_rows(D, query.dtype, TILE_BYTES), query.stride()[:3]
    same = {"CAPPED": softcap is not None, "G": G, "D": D, "BLOCK_D": BLOCK_D}
    # Programs that wait for FlashAttention-3 while it runs would take SMs from it.
    first = {"EARLY": False} if by_flash else early
    if shares > 0:
        _shared_kernel[(shares, H, blocks)](
            query, keys, stored, scales.rows, scales.channels, scales.offsets, scales.units,
            runs.starts, query if runs.used is None else runs.used, *exact,
            centres, stands.log_counts, stood, peaks, totals, outputs,
            R, *strides, *keys.stride()[:2], scales.rows.stride(0), runs.starts.stride(0), runs.capacity,
            E, exact[0].stride(0),
            C, stands.log_counts.stride(0), centres.stride(0), stood.stride(0), softmax_scale, softcap or 0.0,
            ROWS_USED=runs.used is not None, SCALED=runs.scales is not None,
            ROWS=rows_of_tile, TILE=tile, STAGES=STAGES, ROW_STAGES=ROW_STAGES,
            num_warps=WARPS, **same, **first,
        )  # fmt: skip
    _own_kernel[(B, H)](
        query, own.keys, own.values, own.slots, own.first, own.used, *beside, peaks, totals, outputs,
        R, *strides, *own.keys.stride()[:2], *beside[0].stride()[:2], parts, softmax_scale, softcap or 0.0,
        BESIDE=by_flash, GROUP=group_rows(G), TILE=OWN_TILE, num_warps=4, **same, **(early if shares > 0 else first),
    )  # fmt: skip
    softmax.merge(peaks, totals, outputs, sink_logits, merged, MERGED_COLUMNS)
    return merged
