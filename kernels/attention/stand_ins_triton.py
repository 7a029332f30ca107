"""Centroids in the attention's kernel: a program's share of them, and their logits with what they weigh."""

import triton
import triton.language as tl

from sparsekv.kernels.common.tiles_triton import LOG2_E, log2_of_normal


@triton.jit
def share_of_stands(first, last, units, rows, FIFTHS: tl.constexpr):
    """Range of the centroids in a program's share of a head's work units, of which the centroids' are the first.

    Both ends are multiples of 16, so that logits are read four at a time.
    """
    stop = tl.minimum(tl.cdiv(tl.minimum(last, units) * 5 // FIFTHS, 16), tl.cdiv(rows, 16)) * 16
    begin = tl.cdiv(tl.maximum(first, 0) * 5 // FIFTHS, 16) * 16
    return tl.multiple_of(begin, 16), tl.multiple_of(stop, 16)


@triton.jit
def stand_logits_of(logits, log_counts, counts, taken, c, inside, there, of_group, LEFT: tl.constexpr):
    """Logits of some of a head's centroids with what these weigh, in units of log 2."""
    if LEFT:
        number = tl.load(counts + c, mask=there, other=0) - tl.load(taken + c, mask=there, other=0)
        log_left = log2_of_normal(tl.maximum(number, 1).to(tl.float32))
        log_left += tl.load(log_counts + c, mask=there, other=0.0) * LOG2_E
        log_left = tl.where(number > 0, log_left, -float("inf"))
    else:
        log_left = tl.load(log_counts + c, mask=inside, other=-float("inf")) * LOG2_E
    return tl.load(logits + c, mask=of_group[:, None] & inside, other=0.0) * LOG2_E + log_left
