"""A softmax that runs over tiles of rows, with logits in units of log 2: a power of two takes one instruction less than
one of e."""

import triton
import triton.language as tl

from sparsekv.kernels.common.tiles_triton import LOG2_E, capped, dot


@triton.jit
def tile_weights(peak, logits):
    """The highest logits so far, the weights of one tile, and the factor of what came before it."""
    highest = tl.maximum(peak, tl.max(logits, 1))
    # The tiles so far may be masked out completely.
    safe = tl.where(highest == -float("inf"), 0.0, highest)
    return highest, tl.exp2(logits - safe[:, None]), tl.exp2(peak - safe)


@triton.jit
def add_tile(peak, total, output, logits, values):
    """Add one tile to a running softmax."""
    peak, weights, shrink = tile_weights(peak, logits)
    total = total * shrink + tl.sum(weights, 1)
    return peak, total, output * shrink[:, None] + dot(weights.to(values.dtype), values)


@triton.jit
def add_scaled_tile(peak, total, output, logits, values, scales):
    """Add one tile of values that are multiplied by a scale each."""
    peak, weights, shrink = tile_weights(peak, logits)
    total = total * shrink + tl.sum(weights, 1)
    return peak, total, output * shrink[:, None] + dot((weights * scales[None, :]).to(values.dtype), values)


@triton.jit
def store_partial(peaks, totals, outputs, part, parts, head, r, R, d, peak, total, output, D: tl.constexpr):
    """Write the partial softmax of some rows."""
    place = (head * parts + part) * R + r
    tl.store(peaks + place, peak, mask=r < R)
    tl.store(totals + place, total, mask=r < R)
    tl.store(outputs + place[:, None] * D + d, output, mask=(r < R)[:, None] & (d < D))


@triton.jit
def tile_logits(products, bias, scale, softmax_scale, softcap, CAPPED: tl.constexpr):
    """Of products with keys, in units of log 2, with a bias a row; `scale` is the softmax's in these units."""
    if CAPPED:
        return capped(products * softmax_scale, softcap, CAPPED) * LOG2_E + bias
    return products * scale + bias
