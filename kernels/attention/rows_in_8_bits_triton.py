"""Rows in 8 bits in a running softmax, for Triton kernels, and how they are passed to these."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.attention.running_softmax_triton import tile_weights
from sparsekv.kernels.attention.types import RunRows
from sparsekv.kernels.common.eight_bits import RowScales, RowsOf8Bits, pair_block
from sparsekv.kernels.common.pairs_triton import first_of, pair_products, scales_of, second_of, shifted_back
from sparsekv.kernels.common.tiles_triton import LOG2_E, capped, dot, power_of_two


@triton.jit
def add_pairs(
    peak, total, first_output, second_output, first, second, shift, of_queries, offset, keys, values, words, inside,
    unit, softcap, CAPPED: tl.constexpr, EACH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add one tile of rows in 8 bits to a running softmax: keys, values [TILE, D / 2] int16, the words [TILE] of their
    scales, and which are inside. Of the queries it takes what `scaled_queries` gives; outputs [R, D / 2] are those of
    the pairs' channels, over the unit."""
    if EACH:
        of_keys, of_values = scales_of(words, 1.0, unit)
        products = pair_products(first, second, shift, keys, EXACT) * of_keys[None, :]
        logits = products * of_queries[:, None] + offset[:, None]
    else:
        of_keys, of_values = scales_of(words, of_queries, unit)
        logits = pair_products(first, second, shift, keys, EXACT) * of_keys[None, :] + offset[:, None]
    if CAPPED:
        logits = capped(logits, softcap, CAPPED) * LOG2_E
    logits = tl.where(inside, logits, -float("inf"))
    return add_values(peak, total, first_output, second_output, logits, values, of_values, EXACT)


@triton.jit
def add_values(peak, total, first_output, second_output, logits, values, of_values, EXACT: tl.constexpr):
    """Add one tile with logits [R, TILE], in units of log 2, to a running softmax: values [TILE, D / 2] int16, and
    their scales [TILE] over the outputs' unit."""
    peak, weights, shrink = tile_weights(peak, logits)
    total = total * shrink + tl.sum(weights, 1)
    # Not shifted back after the sum: the shift would be a thousand times as large as a mean of many values.
    first_values = shifted_back(first_of(values, EXACT), EXACT)
    second_values = shifted_back(second_of(values, EXACT), EXACT)
    weights = (weights * of_values[None, :]).to(first_values.dtype)
    first_output = first_output * shrink[:, None] + dot(weights, first_values)
    return peak, total, first_output, second_output * shrink[:, None] + dot(weights, second_values)


def block_of(runs: RunRows) -> int:
    """Channels of a block that holds a row's."""
    channels = runs.keys.shape[2]
    return power_of_two(channels) if runs.scales is None else pair_block(channels)


def in_words(runs: RunRows) -> tuple[torch.Tensor, torch.Tensor, RowScales]:
    """Keys and values as kernels take them, `RowsOf8Bits.in_words`; what is not in 8 bits as it is, with scales that
    are never read."""
    if runs.scales is None:
        return runs.keys, runs.values, RowScales(*[runs.keys] * 4)
    words = RowsOf8Bits(runs.keys, runs.values, runs.scales).in_words()
    return words.keys, words.values, words.scales
