"""Numbers in 8 bits for Triton kernels: those of two neighbouring channels are read together, as one of 16 bits.

Tensor cores take float16. From shared memory an operand's numbers come two at a time if they have 16 bits, turned for
the values, but byte by byte if they have 8. So each stays beside its neighbour until it is where it is multiplied, and
a row's channels are two operands of half as many: the first of each pair, and the second.
"""

import triton
import triton.language as tl

from sparsekv.kernels.common.tiles_triton import WIDEN, dot

LARGEST_HALF = tl.constexpr(65504.0)
# A byte of 0 to 255 after 0x64 is a float16 number of 1024 to 1279; SHIFT more than the number that it was, of -128 to
# 127, before its highest bit was turned. The conversion that a GPU has takes an instruction for each number, at a
# quarter of the speed.
SHIFT = tl.constexpr(1152.0)
_FIRST = tl.constexpr("lop3.b32 $0, $1, 0x00FF00FF, 0x64806480, 0x6A;")
_SECOND = tl.constexpr("{ .reg .b32 bytes; xor.b32 bytes, $1, 0x80808080; prmt.b32 $0, bytes, 0x64646464, 0x4341; }")
_SHIFTED_BACK = tl.constexpr("{ .reg .b32 middle; mov.b32 middle, 0x64806480; sub.f16x2 $0, $1, middle; }")


@triton.jit
def first_of(pairs, EXACT: tl.constexpr):
    """The first number of each pair [..., D / 2] int16 as float16, SHIFT more than it is; with EXACT as float32, as it
    is."""
    if EXACT or WIDEN:
        return pairs.to(tl.int8).to(tl.float32)
    else:  # what follows a return would be compiled too, and returns another type
        return tl.inline_asm_elementwise(_FIRST, "=r,r", [pairs], tl.float16, is_pure=True, pack=2)


@triton.jit
def second_of(pairs, EXACT: tl.constexpr):
    """The second number of each pair, likewise."""
    if EXACT or WIDEN:
        return (pairs >> 8).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(_SECOND, "=r,r", [pairs], tl.float16, is_pure=True, pack=2)


@triton.jit
def shifted_back(numbers, EXACT: tl.constexpr):
    """Numbers that are SHIFT more than they were, two in an instruction."""
    if EXACT or WIDEN:
        return numbers
    else:
        return tl.inline_asm_elementwise(_SHIFTED_BACK, "=r,r", [numbers], tl.float16, is_pure=True, pack=2)


@triton.jit
def in_pairs(rows, R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [R, D] as those [R, D / 2] of each pair's first channel and of its second."""
    return tl.split(tl.reshape(rows, [R, BLOCK_D // 2, 2]))


@triton.jit
def from_pairs(first, second, R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [R, D] of those of the pairs' first and second channels."""
    return tl.reshape(tl.join(first, second), [R, BLOCK_D])


@triton.jit
def scaled_queries(q, channels, offsets, d, in_row, scale, EACH: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Queries [R, D] times the scales of the keys' channels, over the largest of these numbers, so that float16 holds
    them, in pairs; what SHIFT adds to their products [R]; the largest number, of EACH query [R] or of all; and the
    queries' products [R] with the channels' offsets. The last two are times the scale of logits.

    One number for all saves a multiplication of each logit, and is for queries of one token.
    """
    EXACT: tl.constexpr = q.dtype == tl.float32
    exact = q.to(tl.float32)
    scaled = exact * tl.load(channels + d, mask=in_row, other=0.0).to(tl.float32)[None, :]
    products = tl.sum(exact * tl.load(offsets + d, mask=in_row, other=0.0).to(tl.float32)[None, :], 1)
    of_each = tl.max(tl.abs(scaled), 1)
    if EACH:
        largest = tl.where(of_each == 0.0, 1.0, of_each)
        scaled = scaled / largest[:, None]
    else:
        most = tl.max(of_each, 0)
        largest = tl.where(most == 0.0, 1.0, most)
        scaled = scaled / largest
    shift = tl.zeros([R], tl.float32)
    if not EXACT:
        scaled = scaled.to(tl.float16)
        if not WIDEN:
            shift = tl.sum(scaled.to(tl.float32), 1) * SHIFT
    first, second = in_pairs(scaled, R, BLOCK_D)
    return first, second, shift, largest * scale, products * scale


@triton.jit
def scales_of(words, of_queries, unit):
    """Scales [TILE] of keys, times one of the queries, and of values, over their unit, of words that hold both."""
    of_keys = (words << 16).to(tl.float32, bitcast=True) * of_queries
    return of_keys, tl.minimum((words & -65536).to(tl.float32, bitcast=True) / unit, LARGEST_HALF)


@triton.jit
def load_pairs(rows, places, in_row, ALL: tl.constexpr):
    """Numbers [TILE, D / 2] int16 at some places. ALL: every channel is a row's, and no load needs a mask."""
    if ALL:
        return tl.load(rows + places)
    else:
        return tl.load(rows + places, mask=in_row[None, :], other=0)


@triton.jit
def pair_products(first, second, shift, keys, EXACT: tl.constexpr):
    """Products [R, TILE] of queries in pairs with the numbers of keys [TILE, D / 2] int16."""
    turned = tl.trans(keys)
    return dot(first, first_of(turned, EXACT)) + dot(second, second_of(turned, EXACT)) - shift[:, None]
