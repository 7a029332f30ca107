"""Several numbers in a word, for Triton: counts of four bits, four bytes, whole numbers of 16, two bfloat16."""

import triton
import triton.language as tl

from sparsekv.kernels.common.tiles_triton import WIDEN

EXPONENT_OF_2_23 = tl.constexpr(0x4B000000)
TO_BYTES = tl.constexpr(96)  # octaves down, where of bfloat16 below 2 no more than the last twelve bits differ
# Two bfloat16 2 ** -96 (1 + 6 / 128): four of the bits are cut off, which is then as often too little as too much.
DOWN = tl.constexpr(0x0F860F86)


@triton.jit
def two_numbers(word):
    """The two numbers of 16 bits in each word, plus 2 ** 23: in its fraction, for conversions have few units."""
    word = word.to(tl.uint32, bitcast=True)
    low = ((word & 0xFFFF) | EXPONENT_OF_2_23).to(tl.float32, bitcast=True)
    high = ((word >> 16) | EXPONENT_OF_2_23).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def exp2(x):
    """2 ** x, with 0 for what is less than float32 has all bits of: without a check for that, half as many steps."""
    if WIDEN:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def halves(word):
    """The two bfloat16 in each word."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pair(low, high):
    """Words of two numbers, not below 0, as bfloat16."""
    if WIDEN:
        low, high = low.to(tl.int32, bitcast=True) + 0x8000, high.to(tl.int32, bitcast=True) + 0x8000
        return ((low >> 16) & 0xFFFF) | (high & -65536)
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def add_scaled(sums, word, factor):
    """sums + word factor, each two bfloat16 in a word."""
    if WIDEN:
        low, high = halves(word)
        low_sum, high_sum = halves(sums)
        of_low, of_high = halves(factor)
        return pair(low_sum + low * of_low, high_sum + high * of_high)
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $2, $3, $1;", "=r,r,r,r", [sums, word, factor], tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def as_bytes(even, odd):
    """A word of the four numbers from 0 to 1 that two words have as bfloat16: five bits of exponent and three of
    fraction, the lowest octaves with fewer. To 8 parts in 100; below 2 ** -33 they are 0."""
    nothing = tl.zeros_like(even)
    even, odd = add_scaled(nothing, even, nothing + DOWN), add_scaled(nothing, odd, nothing + DOWN)
    return ((even >> 4) & 0x00FF00FF) | ((odd << 4) & -16711936)


@triton.jit
def even_bytes(word):
    """Two bfloat16 in a word, 2 ** -96 of what the bytes of even number of another are."""
    return (word & 0x00FF00FF) << 4


@triton.jit
def odd_bytes(word):
    """The same of the other two bytes."""
    return (word >> 4) & 0x0FF00FF0


@triton.jit
def between(word, least, most):
    """Two bfloat16 in a word, none below 0, brought between two others."""
    if WIDEN:
        low, high = word & 0xFFFF, (word >> 16) & 0xFFFF
        low = tl.minimum(tl.maximum(low, least & 0xFFFF), most & 0xFFFF)
        return low | (tl.minimum(tl.maximum(high, least & 0xFFFF), most & 0xFFFF) << 16)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 x; max.bf16x2 x, $1, $2; min.bf16x2 $0, x, $3; }", "=r,r,r,r", [word, least, most], tl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def one_each(words, at: tl.constexpr):
    """1 in the four bits of int64 that the four bits from `at` on of a word number."""
    return tl.full(words.shape, 1, tl.int64) << (((words >> at) & 15) * 4).to(tl.int64)


@triton.jit
def sums_of_fours(counts, QUADS: tl.constexpr):
    """[16] int32: the sums of int64s of 16 numbers of four bits [4 QUADS]. A thread adds up its own without others: a
    histogram of so few bins costs three times as much by votes of a warp."""
    even, odd = counts & 0x0F0F0F0F0F0F0F0F, (counts >> 4) & 0x0F0F0F0F0F0F0F0F
    even, odd = tl.sum(tl.reshape(even, [QUADS, 4]), 1), tl.sum(tl.reshape(odd, [QUADS, 4]), 1)
    first, second = tl.sum(even & 0x00FF00FF00FF00FF, 0), tl.sum(odd & 0x00FF00FF00FF00FF, 0)
    third, fourth = tl.sum((even >> 8) & 0x00FF00FF00FF00FF, 0), tl.sum((odd >> 8) & 0x00FF00FF00FF00FF, 0)
    column = tl.arange(0, 16)
    upper, lower = tl.where(column % 2 == 0, third, fourth), tl.where(column % 2 == 0, first, second)
    sums = tl.where((column & 2) == 0, lower, upper)
    return ((sums >> (16 * (column // 4)).to(tl.int64)) & 0xFFFF).to(tl.int32)
