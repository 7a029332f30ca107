"""Running softmax over tiles of rows for Triton kernels, for float or int8 rows.

Logits are in units of log 2, so that the kernels use exp2.
"""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common import tiles_triton as common
from sparsekv.kernels.common.kernel_inputs import Int8Kernel, RowScales, RunRows, pair_block
from sparsekv.kernels.common.launch import dependent_launch, power_of_two
from sparsekv.kernels.common.tiles_triton import LOG2_E, first_of, pair_products, scales_of, second_of, shifted_back


@triton.jit
def add_tile(peak, total, output, logits, values):
    """Add one tile with logits [R, TILE] and values [TILE, D] to a running softmax."""
    peak, weights, shrink = common.tile_weights(peak, logits)
    total = total * shrink + tl.sum(weights, 1)
    return peak, total, output * shrink[:, None] + common.dot(weights.to(values.dtype), values)


@triton.jit
def store_partial(peaks, totals, outputs, part, parts, head, r, R, d, peak, total, output, D: tl.constexpr):
    """Write program `part`'s partial softmax of query rows `r`: largest logit, sum of exponentials, and output."""
    place = (head * parts + part) * R + r
    tl.store(peaks + place, peak, mask=r < R)
    tl.store(totals + place, total, mask=r < R)
    tl.store(outputs + place[:, None] * D + d, output, mask=(r < R)[:, None] & (d < D))


@triton.jit
def tile_logits(products, bias, scale, softmax_scale, softcap, CAPPED: tl.constexpr):
    """Convert query-key products to logits in units of log 2, and add one bias for each key row.

    `scale` is the softmax scale in units of log 2.
    """
    if CAPPED:
        return common.capped(products * softmax_scale, softcap, CAPPED) * LOG2_E + bias
    return products * scale + bias


@triton.jit(do_not_specialize=["R", "parts"])
def _merge_kernel(
    peaks, totals, outputs, sink_logits, merged, R, parts, out_head, out_group, out_token,
    HAS_SINKS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    common.wait_for_previous_kernel(EARLY)
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
    token = (r // G).to(tl.int64)
    tl.store(merged + head * out_head + (r % G) * out_group + token * out_token + d, output, mask=d < D)


def merge(
    peaks: torch.Tensor,
    totals: torch.Tensor,
    outputs: torch.Tensor,
    sink_logits: torch.Tensor | None,
    merged: torch.Tensor,
    columns: int,
) -> None:
    """Merge partial softmaxes into the output `merged` [H, G, B, D]; each program writes `columns` channels.

    Args:
        peaks, totals: [H, parts, B G] float32, contiguous, as `store_partial` writes them.
        outputs: [H, parts, B G, D] float32, contiguous, as `store_partial` writes them.
        sink_logits: [H, G] learned logits that have no value row.
    """
    H, parts, R, D = outputs.shape
    # Only the first axis of a grid may exceed 65,535 programs.
    _merge_kernel[(R, triton.cdiv(D, columns), H)](
        peaks, totals, outputs, peaks if sink_logits is None else sink_logits.contiguous(), merged, R, parts,
        *merged.stride()[:3], HAS_SINKS=sink_logits is not None, G=merged.shape[1], D=D, PARTS=power_of_two(parts),
        COLUMNS=columns, num_warps=4, **dependent_launch(outputs.device),
    )  # fmt: skip


@triton.jit
def add_pairs(
    peak, total, first_output, second_output, first, second, shift, of_queries, offset, keys, values, words, inside,
    unit, softcap, CAPPED: tl.constexpr, EACH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add one tile of int8 rows to a running softmax.

    Keys and values [TILE, D / 2] int16 hold pairs of channels. `words` [TILE] hold the rows' packed scales. `inside`
    masks the valid rows. `first`, `second`, `shift`, `of_queries` and `offset` come from `scaled_queries`. The outputs
    [R, D / 2] are those of the first and second channels of the pairs, divided by `unit`.
    """
    if EACH:
        of_keys, of_values = scales_of(words, 1.0, unit)
        products = pair_products(first, second, shift, keys, EXACT) * of_keys[None, :]
        logits = products * of_queries[:, None] + offset[:, None]
    else:
        of_keys, of_values = scales_of(words, of_queries, unit)
        logits = pair_products(first, second, shift, keys, EXACT) * of_keys[None, :] + offset[:, None]
    if CAPPED:
        logits = common.capped(logits, softcap, CAPPED) * LOG2_E
    logits = tl.where(inside, logits, -float("inf"))
    return add_values(peak, total, first_output, second_output, logits, values, of_values, EXACT)


@triton.jit
def add_values(peak, total, first_output, second_output, logits, values, of_values, EXACT: tl.constexpr):
    """Add one tile of int8 values with logits [R, TILE], in units of log 2, to a running softmax.

    Values [TILE, D / 2] int16 hold pairs of channels. `of_values` [TILE] holds their scales, divided by the outputs'
    unit.
    """
    peak, weights, shrink = common.tile_weights(peak, logits)
    total = total * shrink + tl.sum(weights, 1)
    # SHIFT, which the conversion adds to int8 values, is subtracted from each value before the sum. A sum of values
    # with SHIFT could be a thousand times as large, and rounding would lose the sum of the values in it.
    first_values = shifted_back(first_of(values, EXACT), EXACT)
    second_values = shifted_back(second_of(values, EXACT), EXACT)
    weights = (weights * of_values[None, :]).to(first_values.dtype)
    first_output = first_output * shrink[:, None] + common.dot(weights, first_values)
    return peak, total, first_output, second_output * shrink[:, None] + common.dot(weights, second_values)


def block_of(runs: RunRows) -> int:
    """Return the width, in channels, of a block that holds a whole row."""
    channels = runs.keys.shape[2]
    return power_of_two(channels) if runs.scales is None else pair_block(channels)


def in_words(runs: RunRows) -> tuple[torch.Tensor, torch.Tensor, RowScales]:
    """Return keys, values and scales in the layout that the kernels read.

    Int8 rows are converted by `Int8Kernel.in_words`. Float rows are returned unchanged, with dummy scales that are
    never read.
    """
    if runs.scales is None:
        return runs.keys, runs.values, RowScales(*[runs.keys] * 4)
    words = Int8Kernel(runs.keys, runs.values, runs.scales).in_words()
    return words.keys, words.values, words.scales
