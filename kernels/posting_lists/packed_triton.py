"""Numbers packed in 32-bit words, and bounds of the chosen ranks from counts of ranks, for Triton kernels."""

import triton
import triton.language as tl

from sparsekv.kernels.common.tiles_triton import WIDEN, sum_of_four, sum_of_three, sum_of_two

EXPONENT_OF_2_23 = tl.constexpr(0x4B000000)
# Exponent of a scale: bfloat16 from 0 to below 2, times 2 ** -TO_BYTES, differ only in their last twelve bits.
TO_BYTES = tl.constexpr(96)
# Two bfloat16 of value 2 ** -96 (1 + 6 / 128). `as_bytes` drops the last four of these twelve bits, which makes numbers
# smaller. The factor 1 + 6 / 128 compensates for the mean loss.
DOWN = tl.constexpr(0x0F860F86)


@triton.jit
def two_numbers(word):
    """Return the two 16-bit integers of each word as float32 values, with 2 ** 23 added to each.

    The integers become the fraction bits of the result, because conversion instructions are slow.
    """
    word = word.to(tl.uint32, bitcast=True)
    low = ((word & 0xFFFF) | EXPONENT_OF_2_23).to(tl.float32, bitcast=True)
    high = ((word >> 16) | EXPONENT_OF_2_23).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def two_small_numbers(word):
    """Convert the two integers below 2048 in each word to float32, times 2 ** -24.

    Read as float16, the bits of such an integer are this value. The conversion from float16 has twice the speed of a
    conversion from integers.
    """
    low, high = (word & 0xFFFF).to(tl.int16), ((word >> 16) & 0xFFFF).to(tl.int16)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def exp2(x):
    """Compute 2 ** x. On a GPU, subnormal results are 0: to compute them would take twice as many instructions."""
    if WIDEN:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def halves(word):
    """Convert the two bfloat16 in each word to float32."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pair(low, high):
    """Round two non-negative numbers to bfloat16, and pack them in a word."""
    if WIDEN:
        low, high = low.to(tl.int32, bitcast=True) + 0x8000, high.to(tl.int32, bitcast=True) + 0x8000
        return ((low >> 16) & 0xFFFF) | (high & -65536)
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def add_scaled(sums, word, factor):
    """Compute sums + word * factor, where each operand is a word of two bfloat16."""
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
    """Pack the four bfloat16 of two words, each from 0 to 1, into a word of four bytes.

    A byte has five exponent bits and three fraction bits, with fewer fraction bits in the lowest octaves. The relative
    error of a byte is at most 8%. Numbers below 2 ** -33 become 0.
    """
    nothing = tl.zeros_like(even)
    even, odd = add_scaled(nothing, even, nothing + DOWN), add_scaled(nothing, odd, nothing + DOWN)
    return ((even >> 4) & 0x00FF00FF) | ((odd << 4) & -16711936)


@triton.jit
def even_bytes(word):
    """Unpack the even bytes of a word of `as_bytes` to a word of two bfloat16, which are the numbers times 2 ** -96."""
    return (word & 0x00FF00FF) << 4


@triton.jit
def odd_bytes(word):
    """Unpack the odd bytes of a word of `as_bytes` to a word of two bfloat16, which are the numbers times 2 ** -96."""
    return (word >> 4) & 0x0FF00FF0


@triton.jit
def byte_of(word, at: tl.constexpr):
    """Extract byte number `at` of each word, as an integer."""
    if WIDEN:
        return (word >> (8 * at)) & 255
    bytes_taken = tl.full(word.shape, 0x4440 + at, tl.int32)
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [word, bytes_taken], tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def second_and_fourth(word):
    """Extract the second and fourth byte of each word, as a word of two 16-bit integers."""
    if WIDEN:
        return (word >> 8) & 0x00FF00FF
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x4341;", "=r,r", [word], tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def between(word, least, most):
    """Clamp words of two non-negative bfloat16 between those of two other words."""
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
    """Return int64 words of 16 four-bit counters, all 0 except one, which is 1.

    The index of that counter is the number in the four bits of each word of `words` from bit `at` on.
    """
    return tl.full(words.shape, 1, tl.int64) << (((words >> at) & 15) * 4).to(tl.int64)


@triton.jit
def sums_of_fours(counts, QUADS: tl.constexpr):
    """Sum the 16 four-bit counters of int64 words [4 QUADS] over the words; return [16] int32.

    Each thread first sums the words that it holds. For 16 bins, a histogram by warp votes takes three times as long.
    """
    even, odd = counts & 0x0F0F0F0F0F0F0F0F, (counts >> 4) & 0x0F0F0F0F0F0F0F0F
    even, odd = tl.sum(tl.reshape(even, [QUADS, 4]), 1), tl.sum(tl.reshape(odd, [QUADS, 4]), 1)
    # A single reduction is used, because each reduction makes all threads of a program wait twice.
    first, second, third, fourth = tl.reduce(
        (
            even & 0x00FF00FF00FF00FF,
            odd & 0x00FF00FF00FF00FF,
            (even >> 8) & 0x00FF00FF00FF00FF,
            (odd >> 8) & 0x00FF00FF00FF00FF,
        ),
        0,
        sum_of_four,
    )
    column = tl.arange(0, 16)
    upper, lower = tl.where(column % 2 == 0, third, fourth), tl.where(column % 2 == 0, first, second)
    sums = tl.where((column & 2) == 0, lower, upper)
    return ((sums >> (16 * (column // 4)).to(tl.int64)) & 0xFFFF).to(tl.int32)


@triton.jit
def set_bits(words):
    """Count the set bits of each word."""
    if WIDEN:
        words = words.to(tl.uint32, bitcast=True)
        words -= (words >> 1) & 0x55555555
        words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
        return ((((words + (words >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)
    return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [words], tl.int32, is_pure=True, pack=1)


@triton.jit
def store_words(places, words, mask):
    """Store words like `tl.store`, directly from the threads that hold them.

    `tl.store` would first convert the layout through shared memory.
    """
    if WIDEN:
        tl.store(places, words, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }", "=r,l,r,r",
            [places.to(tl.int64), words, mask.to(tl.int32)], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def sums_of_bins(counts, tile, tiles, BINS: tl.constexpr, ROWS: tl.constexpr):
    """Sum a head's counts [tiles, BINS] over all tiles and over the tiles before `tile`; return both, [BINS] each."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BINS)
    every = tl.zeros([BINS], tl.int32)
    before = every
    for at in range(0, tiles, ROWS):
        rows = (at + row)[:, None]
        some = tl.load(counts + rows * BINS + column, mask=rows < tiles, other=0)
        # A single reduction is used, because each reduction makes all threads of a program wait twice.
        of_all, of_these = tl.reduce((some, tl.where(rows < tile, some, 0)), 0, sum_of_two)
        every, before = every + of_all, before + of_these
    return every, before


@triton.jit
def _sums_of_pairs(counts, tile, tiles, FEW_RANKS: tl.constexpr, ROWS: tl.constexpr):
    """Sum like `sums_of_bins`, but counts of single ranks, which are packed two in a word.

    Return the sums over all tiles and over the tiles before `tile`, [FEW_RANKS] each.
    """
    PAIRS: tl.constexpr = FEW_RANKS // 2
    row, column = tl.arange(0, ROWS), tl.arange(0, PAIRS)
    even, odd, even_before, odd_before = (
        tl.zeros([PAIRS], tl.int32), tl.zeros([PAIRS], tl.int32), tl.zeros([PAIRS], tl.int32),
        tl.zeros([PAIRS], tl.int32),
    )  # fmt: skip
    for at in range(0, tiles, ROWS):
        rows = (at + row)[:, None]
        words = tl.load(counts + rows * PAIRS + column, mask=rows < tiles, other=0)
        before = tl.where(rows < tile, words, 0)
        some = tl.reduce((words & 0xFFFF, words >> 16, before & 0xFFFF, before >> 16), 0, sum_of_four)
        even, odd = even + some[0], odd + some[1]
        even_before, odd_before = even_before + some[2], odd_before + some[3]
    return tl.interleave(even, odd), tl.interleave(even_before, odd_before)


@triton.jit
def last_bin(counts, wanted, BINS: tl.constexpr):
    """Find the highest bin such that it and the bins above hold `wanted` keys; 0 if there are fewer keys.

    Also return the number of keys to take from this bin.
    """
    column = tl.arange(0, BINS)
    from_here = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    last = tl.max(tl.where(from_here >= wanted, column, 0), 0)
    return last, wanted - tl.sum(tl.where(column > last, counts, 0), 0)


@triton.jit
def _bounds(coarse, fine, wanted, tile, tiles, BINS: tl.constexpr, ROWS: tl.constexpr):
    """Compute the lowest rank that a head chooses, and where one tile writes its chosen keys.

    Returns:
        the lowest chosen rank; the number of chosen keys in the tiles before `tile`; and how many keys of this rank are
        still to be taken, from `tile` and later tiles.
    """
    every, before = sums_of_bins(coarse, tile, tiles, BINS, ROWS)
    last_coarse, left = last_bin(every, wanted, BINS)
    fine_every, fine_before = sums_of_bins(fine, tile, tiles, BINS, ROWS)
    last_fine, room = last_bin(fine_every, left, BINS)
    column = tl.arange(0, BINS)
    first = tl.sum(tl.where(column > last_coarse, before, 0) + tl.where(column > last_fine, fine_before, 0), 0)
    equal_before = tl.sum(tl.where(column == last_fine, fine_before, 0), 0)
    first += tl.minimum(equal_before, room)
    return last_coarse * BINS + last_fine, first, tl.maximum(room - equal_before, 0)


@triton.jit
def _bounds_of_few(counts, wanted, tile, tiles, FEW_RANKS: tl.constexpr, ROWS: tl.constexpr):
    """Compute the results of `_bounds` if there is a count for each rank."""
    every, before = _sums_of_pairs(counts, tile, tiles, FEW_RANKS, ROWS)
    column = tl.arange(0, FEW_RANKS)
    last = tl.max(tl.where(tl.cumsum(every, 0, reverse=True) >= wanted, column, 0), 0)
    above, first, equal_before = tl.reduce(
        (tl.where(column > last, every, 0), tl.where(column > last, before, 0), tl.where(column == last, before, 0)),
        0, sum_of_three,
    )  # fmt: skip
    room = wanted - above
    return last, first + tl.minimum(equal_before, room), tl.maximum(room - equal_before, 0)


@triton.jit
def bounds_of(coarse, fine, head, wanted, tile, tiles, FEW_RANKS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr):
    """Compute the lowest rank that a head chooses, and where one tile writes its chosen keys; see `_bounds`.

    With FEW_RANKS, this uses the counts of FEW_RANKS ranks. Otherwise FEW_RANKS is 0, and this uses the counts of
    coarse bins and of the ranks in one bin.
    """
    if FEW_RANKS:
        bounds = _bounds_of_few(coarse + head * tiles * (FEW_RANKS // 2), wanted, tile, tiles, FEW_RANKS, ROWS)
    else:
        bounds = _bounds(coarse + head * tiles * BINS, fine + head * tiles * BINS, wanted, tile, tiles, BINS, ROWS)
    return bounds
