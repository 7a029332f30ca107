"""Product of one 16-bit row with int8 or 4-bit weights, in Triton: the row in fixed point, multiplied by dp4a.

Each 16 neighbouring channels of the row become 16-bit integers times a power of two, so that the largest has all 16
bits. A channel's error is at most 2^-15 of the largest magnitude of its 16 channels. The instruction dp4a adds the
products of four bytes with four bytes. So a thread multiplies the high and the low bytes of 16 integers separately, and
no weight is converted. Sums over 16 channels are exact, and their sums are float32.

The magnitude of a sum over 16 channels is at most 16 * 128 * 2^15 = 2^26 for int8 weights. 4-bit numbers in the high
halves of bytes are multiplied as 16 times themselves, at most 128 too. So each result fits in int32. Intermediate sums
may wrap around, which does not change the result.
"""

import triton
import triton.language as tl

from sparsekv.kernels.common import tiles_triton as common

# Of 16 floats of 16 bits, in four times 8 bytes: the bits of the largest magnitude. From Hopper on.
_PEAK = tl.constexpr(
    """{ .reg .b32 a, b, c, d, e, f, g, h;
    mov.b64 {a, b}, $1; mov.b64 {c, d}, $2; mov.b64 {e, f}, $3; mov.b64 {g, h}, $4;
    and.b32 a, a, 0x7FFF7FFF; and.b32 b, b, 0x7FFF7FFF; and.b32 c, c, 0x7FFF7FFF; and.b32 d, d, 0x7FFF7FFF;
    and.b32 e, e, 0x7FFF7FFF; and.b32 f, f, 0x7FFF7FFF; and.b32 g, g, 0x7FFF7FFF; and.b32 h, h, 0x7FFF7FFF;
    max.u16x2 a, a, b; max.u16x2 c, c, d; max.u16x2 e, e, f; max.u16x2 g, g, h;
    max.u16x2 a, a, c; max.u16x2 e, e, g; max.u16x2 a, a, e;
    shr.u32 b, a, 16; and.b32 a, a, 0xFFFF; max.u32 $0, a, b; }"""
)
# Four 16-bit floats in $2, times the power of two $3, become 16-bit integers: the lowest bits of their sum with
# 1.5 * 2^23, whose unit in the last place is 1. $0 are the high bytes, $1 the low bytes.
_FIXED = """fma.rn.f32 w, w, $3, 0f4B400000; fma.rn.f32 x, x, $3, 0f4B400000;
    fma.rn.f32 y, y, $3, 0f4B400000; fma.rn.f32 z, z, $3, 0f4B400000;
    prmt.b32 w, w, x, 0x5410; prmt.b32 y, y, z, 0x5410; prmt.b32 $0, w, y, 0x7531; prmt.b32 $1, w, y, 0x6420; }"""
_FIXED_BFLOATS = tl.constexpr(
    """{ .reg .b32 a, b, w, x, y, z; mov.b64 {a, b}, $2; shl.b32 w, a, 16; and.b32 x, a, 0xFFFF0000;
    shl.b32 y, b, 16; and.b32 z, b, 0xFFFF0000; """
    + _FIXED
)
_FIXED_HALVES = tl.constexpr(
    """{ .reg .b16 p, q, r, s; .reg .b32 w, x, y, z; mov.b64 {p, q, r, s}, $2;
    cvt.f32.f16 w, p; cvt.f32.f16 x, q; cvt.f32.f16 y, r; cvt.f32.f16 z, s; """
    + _FIXED
)
# Four bfloat16 times four others, as sums with -0: GPUs before Hopper have no plain product of two at a time.
_SCALED = tl.constexpr(
    """{ .reg .b32 a, b, c, d, z; mov.b64 {a, b}, $1; mov.b64 {c, d}, $2; mov.b32 z, 0x80008000;
    fma.rn.bf16x2 a, a, c, z; fma.rn.bf16x2 b, b, d, z; mov.b64 $0, {a, b}; }"""
)
# 16 int8 weights times 16 integers of two bytes: $1 to $4 weights, $5 to $8 high bytes, $9 to $12 low bytes.
_DOT8 = tl.constexpr(
    """{ .reg .b32 h, l; dp4a.s32.s32 h, $1, $5, 0; dp4a.s32.u32 l, $1, $9, 0;
    dp4a.s32.s32 h, $2, $6, h; dp4a.s32.u32 l, $2, $10, l; dp4a.s32.s32 h, $3, $7, h; dp4a.s32.u32 l, $3, $11, l;
    dp4a.s32.s32 h, $4, $8, h; dp4a.s32.u32 l, $4, $12, l; mad.lo.s32 $0, h, 256, l; }"""
)
# -8 times the sum of 16 integers: $1 to $4 high bytes, $5 to $8 low bytes.
_OFFSET = tl.constexpr(
    """{ .reg .b32 h, l, c, d; mov.b32 c, 0xF8F8F8F8; mov.b32 d, 0xF8F8F8F8;
    dp4a.s32.s32 h, c, $1, 0; dp4a.s32.u32 l, c, $5, 0; dp4a.s32.s32 h, c, $2, h; dp4a.s32.u32 l, c, $6, l;
    dp4a.s32.s32 h, c, $3, h; dp4a.s32.u32 l, c, $7, l; dp4a.s32.s32 h, c, $4, h; dp4a.s32.u32 l, c, $8, l;
    mad.lo.s32 $0, h, 256, l; }"""
)
# 32 weights of 4 bits. $2 to $5 words; $6 to $9 high and $10 to $13 low bytes for the low halves; $14 to $17 high and
# $18 to $21 low bytes for the high halves. Low halves are multiplied as they are stored, without their -8, and $22 is
# the sum of these missing products. A high half with its highest bit flipped is a signed number of -8 to 7, times 16,
# and so is the result $1.
_DOT4 = tl.constexpr(
    """{ .reg .b32 a, b, h, l, i, m;
    and.b32 a, $2, 0x0F0F0F0F; lop3.b32 b, $2, 0xF0F0F0F0, 0x80808080, 0x6A;
    dp4a.u32.s32 h, a, $6, 0; dp4a.u32.u32 l, a, $10, $22; dp4a.s32.s32 i, b, $14, 0; dp4a.s32.u32 m, b, $18, 0;
    and.b32 a, $3, 0x0F0F0F0F; lop3.b32 b, $3, 0xF0F0F0F0, 0x80808080, 0x6A;
    dp4a.u32.s32 h, a, $7, h; dp4a.u32.u32 l, a, $11, l; dp4a.s32.s32 i, b, $15, i; dp4a.s32.u32 m, b, $19, m;
    and.b32 a, $4, 0x0F0F0F0F; lop3.b32 b, $4, 0xF0F0F0F0, 0x80808080, 0x6A;
    dp4a.u32.s32 h, a, $8, h; dp4a.u32.u32 l, a, $12, l; dp4a.s32.s32 i, b, $16, i; dp4a.s32.u32 m, b, $20, m;
    and.b32 a, $5, 0x0F0F0F0F; lop3.b32 b, $5, 0xF0F0F0F0, 0x80808080, 0x6A;
    dp4a.u32.s32 h, a, $9, h; dp4a.u32.u32 l, a, $13, l; dp4a.s32.s32 i, b, $17, i; dp4a.s32.u32 m, b, $21, m;
    mad.lo.s32 $0, h, 256, l; mad.lo.s32 $1, i, 256, m; }"""
)


@triton.jit
def _peak_of_quad(quads):
    """Return the bits of the largest magnitude of each four 16-bit floats."""
    x, y = (quads & 0x7FFF7FFF).to(tl.int32), ((quads >> 32) & 0x7FFF7FFF).to(tl.int32)
    return tl.maximum(tl.maximum(x & 0xFFFF, x >> 16), tl.maximum(y & 0xFFFF, y >> 16))


@triton.jit
def peak(a, b, c, d, EARLY: tl.constexpr):
    """Return the bits of the largest magnitude of each 16 floats of 16 bits, four in each int64.

    EARLY is true from Hopper on. Other GPUs have no maximum of two 16-bit numbers at a time.
    """
    if EARLY:
        return tl.inline_asm_elementwise(_PEAK, "=r,l,l,l,l", [a, b, c, d], tl.int32, is_pure=True, pack=1)
    else:  # the `else` is needed: code after a return is compiled too
        return tl.maximum(
            tl.maximum(_peak_of_quad(a), _peak_of_quad(b)), tl.maximum(_peak_of_quad(c), _peak_of_quad(d))
        )


@triton.jit
def _bytes_of_quad(quads, factor, HALF: tl.constexpr):
    """Multiply four floats by `factor`, and round them to 16-bit integers; return their high and their low bytes."""
    if HALF:
        return tl.inline_asm_elementwise(
            _FIXED_HALVES, "=r,=r,l,r", [quads, factor], (tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _FIXED_BFLOATS, "=r,=r,l,r", [quads, factor], (tl.int32, tl.int32), is_pure=True, pack=1
        )


@triton.jit
def _fixed_point(a, b, c, d, HALF: tl.constexpr, EARLY: tl.constexpr):
    """Convert 16 floats to integers; return four words of high bytes, four words of low bytes, and the scale.

    The scale of floats that are not all finite is NaN. Powers of two below the normal floats are not used: if all 16
    magnitudes are below 2^-111, the integers are multiples of 2^-126.
    """
    most = peak(a, b, c, d, EARLY)
    if HALF:
        exponent = most.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    else:
        exponent = most >> 7
    exponent = tl.maximum(exponent, 15)
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(exponent == 255, 0x7FC00000, (exponent - 14) << 23).to(tl.float32, bitcast=True)
    a_high, a_low = _bytes_of_quad(a, factor, HALF)
    b_high, b_low = _bytes_of_quad(b, factor, HALF)
    c_high, c_low = _bytes_of_quad(c, factor, HALF)
    d_high, d_low = _bytes_of_quad(d, factor, HALF)
    return a_high, b_high, c_high, d_high, a_low, b_low, c_low, d_low, scale


@triton.jit
def _load_quads(row, at, quads, WHOLE: tl.constexpr):
    """Load 16 channels of the row as four quads [1, C] each; quads from number `quads` on are zeros."""
    row = row.to(tl.pointer_type(tl.int64))
    at = at[None, :]
    if WHOLE:
        return tl.load(row + at), tl.load(row + at + 1), tl.load(row + at + 2), tl.load(row + at + 3)
    else:
        inside = at < quads  # the row has a multiple of 16 channels
        return (
            tl.load(row + at, mask=inside, other=0),
            tl.load(row + at + 1, mask=inside, other=0),
            tl.load(row + at + 2, mask=inside, other=0),
            tl.load(row + at + 3, mask=inside, other=0),
        )


@triton.jit
def _squares(quads):
    """Sum the squares of each four bfloat16."""
    x, y = quads.to(tl.int32), (quads >> 32).to(tl.int32)
    a, b = (x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True)
    c, d = (y << 16).to(tl.float32, bitcast=True), (y & -65536).to(tl.float32, bitcast=True)
    return a * a + b * b + c * c + d * d


@triton.jit
def _load_row(row, norm, at, quads, NORM: tl.constexpr, WHOLE: tl.constexpr):
    """Load 16 channels of the row as `_load_quads` does; with NORM multiply them by weights, in bfloat16.

    Also returns the sum of the 16 squares before that product, or 0 without NORM.
    """
    a, b, c, d = _load_quads(row, at, quads, WHOLE)
    if NORM:
        squares = _squares(a) + _squares(b) + _squares(c) + _squares(d)
        e, f, g, h = _load_quads(norm, at, quads, WHOLE)
        a = tl.inline_asm_elementwise(_SCALED, "=l,l,l", [a, e], tl.int64, is_pure=True, pack=1)
        b = tl.inline_asm_elementwise(_SCALED, "=l,l,l", [b, f], tl.int64, is_pure=True, pack=1)
        c = tl.inline_asm_elementwise(_SCALED, "=l,l,l", [c, g], tl.int64, is_pure=True, pack=1)
        d = tl.inline_asm_elementwise(_SCALED, "=l,l,l", [d, h], tl.int64, is_pure=True, pack=1)
        return a, b, c, d, squares
    else:
        return a, b, c, d, 0.0


@triton.jit
def _load_words(words, at, size, WHOLE: tl.constexpr):
    """Load words [N, W] of weights, whose outputs begin at `words` [N]; words from number `size` on are zeros."""
    words = words[:, None] + at[None, :]
    if WHOLE:
        return tl.load(words, eviction_policy="evict_first")
    else:
        return tl.load(words, mask=(at < size)[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def _load_scales(scales, at, pairs, WHOLE: tl.constexpr):
    """Load the scales [N, C] of pairs `at`. In this order of axes, a warp reads neighbouring pairs."""
    scales = at[:, None] + scales[None, :]
    if WHOLE:
        return tl.trans(tl.load(scales))
    else:
        return tl.trans(tl.load(scales, mask=(at < pairs)[:, None], other=0))


@triton.jit
def _four(words, N: tl.constexpr, C: tl.constexpr):
    """Split words [N, 4 C] into the first, second, third and fourth of each four."""
    even, odd = tl.split(tl.reshape(words, [N, C, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _products8(
    w, row, norm, at, quads, NORM: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Multiply words [N, 4 C] of int8 weights by 16 C channels of the row.

    Returns sums over 16 channels [N, C], and the row's squares [1, C] as `_load_row` does.
    """
    HALF: tl.constexpr = row.dtype.element_ty == tl.float16
    a, b, c, d, squares = _load_row(row, norm, at, quads, NORM, WHOLE)
    e, f, g, h, i, j, k, m, scale = _fixed_point(a, b, c, d, HALF, EARLY)
    a, b, c, d = _four(w, BLOCK_N, C)
    found = tl.inline_asm_elementwise(
        _DOT8, "=r,r,r,r,r,r,r,r,r,r,r,r,r", [a, b, c, d, e, f, g, h, i, j, k, m], tl.int32, is_pure=True, pack=1
    )
    return found.to(tl.float32) * scale, squares


@triton.jit
def multiply_int8(
    row, norm, weights, scales, K, NORM: tl.constexpr, WHOLE: tl.constexpr, ONCE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply a row of 16-bit floats [K] by int8 weights, of which each output begins at `weights` [BLOCK_N].

    K is a multiple of 16, and all addresses are multiples of 16 bytes. `scales` [BLOCK_N] are addresses too. ONCE: all
    K channels are read at once. NORM: the row is multiplied by `norm` [K], both bfloat16.

    Returns:
        The products [BLOCK_N], and with NORM the sum of the row's squares.
    """
    C: tl.constexpr = BLOCK_K // 16
    W: tl.constexpr = BLOCK_K // 4
    size = K // 4
    at, quad = tl.arange(0, W), tl.arange(0, C) * 4
    w = _load_words(weights, at, size, WHOLE)
    of_outputs = tl.load(scales)
    common.wait_for_previous_kernel(EARLY)
    if ONCE:
        sums, squares = _products8(w, row, norm, quad, size, NORM, WHOLE, EARLY, BLOCK_N, C)
    else:
        sums, squares = tl.zeros([BLOCK_N, C], tl.float32), tl.zeros([1, C], tl.float32)
        for start in range(0, size, W):
            if start > 0:
                w = _load_words(weights, start + at, size, WHOLE)
            more, of_row = _products8(w, row, norm, start + quad, size, NORM, WHOLE, EARLY, BLOCK_N, C)
            sums += more
            squares += of_row
    return tl.sum(sums, 1) * of_outputs, tl.sum(squares) if NORM else 0.0


@triton.jit
def _products4(
    w, of_pairs, row, norm, at, quads, NORM: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Multiply words [N, 4 C] of 4-bit weights by 32 C channels of the row.

    `of_pairs` [N, C] are words of two bfloat16 scales: of the low and of the high halves.

    Returns sums over 32 channels [N, C], and the row's squares [1, C] as `_load_row` does.
    """
    HALF: tl.constexpr = row.dtype.element_ty == tl.float16
    a, b, c, d, x_squares = _load_row(row, norm, at, quads, NORM, WHOLE)
    e, f, g, h, i, j, k, m, x_scale = _fixed_point(a, b, c, d, HALF, EARLY)
    a, b, c, d, y_squares = _load_row(row, norm, at + 8, quads, NORM, WHOLE)
    n, o, p, q, r, s, t, u, y_scale = _fixed_point(a, b, c, d, HALF, EARLY)
    a, b, c, d = _four(w, BLOCK_N, C)
    of_x = tl.inline_asm_elementwise(
        _OFFSET, "=r,r,r,r,r,r,r,r,r", [e, f, g, h, i, j, k, m], tl.int32, is_pure=True, pack=1
    )
    x, y = tl.inline_asm_elementwise(
        _DOT4, "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q, r, s, t, u, of_x],
        (tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    sums = x.to(tl.float32) * (of_pairs << 16).to(tl.float32, bitcast=True) * x_scale
    sums += y.to(tl.float32) * (of_pairs & -65536).to(tl.float32, bitcast=True) * (y_scale * 0.0625)
    return sums, x_squares + y_squares


@triton.jit
def multiply_int4(
    row, norm, weights, scales, K, NORM: tl.constexpr, WHOLE: tl.constexpr, ONCE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply a row by 4-bit weights as `multiply_int8` does; 64 channels are 8 words and a word of two scales."""
    C: tl.constexpr = BLOCK_K // 32
    W: tl.constexpr = BLOCK_K // 8
    pairs = tl.cdiv(K, 64)
    size = pairs * 8
    at, c = tl.arange(0, W), tl.arange(0, C)
    w = _load_words(weights, at, size, WHOLE)
    of_pairs = _load_scales(scales, c // 2, pairs, WHOLE)
    common.wait_for_previous_kernel(EARLY)
    quad = c // 2 * 16 + c % 2 * 4
    if ONCE:
        sums, squares = _products4(w, of_pairs, row, norm, quad, K // 4, NORM, WHOLE, EARLY, BLOCK_N, C)
    else:
        sums, squares = tl.zeros([BLOCK_N, C], tl.float32), tl.zeros([1, C], tl.float32)
        for start in range(0, size, W):
            if start > 0:
                w = _load_words(weights, start + at, size, WHOLE)
                of_pairs = _load_scales(scales, start // 8 + c // 2, pairs, WHOLE)
            more, of_row = _products4(
                w, of_pairs, row, norm, start * 2 + quad, K // 4, NORM, WHOLE, EARLY, BLOCK_N, C
            )  # fmt: skip
            sums += more
            squares += of_row
    return tl.sum(sums, 1), tl.sum(squares) if NORM else 0.0
