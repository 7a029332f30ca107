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
def _load_row(row, at, quads, WHOLE: tl.constexpr):
    """Load 16 channels of the row as four quads [1, C] each; quads from number `quads` on are zeros."""
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
def _load_words(words, at, size, WHOLE: tl.constexpr):
    """Load words of weights [N, W]; words from number `size` of an output on are zeros."""
    if WHOLE:
        return tl.load(words + at[None, :], eviction_policy="evict_first")
    else:
        return tl.load(words + at[None, :], mask=(at < size)[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def _load_scales(scales, outputs, at, pairs, WHOLE: tl.constexpr):
    """Load the scales [N, C] of pairs `at`. In this order of axes, a warp reads neighbouring pairs."""
    if WHOLE:
        return tl.trans(tl.load(scales + at[:, None] + outputs[None, :]))
    else:
        return tl.trans(tl.load(scales + at[:, None] + outputs[None, :], mask=(at < pairs)[:, None], other=0))


@triton.jit
def _four(words, N: tl.constexpr, C: tl.constexpr):
    """Split words [N, 4 C] into the first, second, third and fourth of each four."""
    even, odd = tl.split(tl.reshape(words, [N, C, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _outputs(program, N, EVEN: tl.constexpr, BLOCK_N: tl.constexpr):
    """Number the outputs of a program, from its first one on. The last output stands for those beyond it."""
    outputs = tl.arange(0, BLOCK_N)
    return outputs if EVEN else tl.minimum(outputs, N - 1 - program * BLOCK_N)


@triton.jit
def _products8(w, row, at, quads, WHOLE: tl.constexpr, EARLY: tl.constexpr, BLOCK_N: tl.constexpr, C: tl.constexpr):
    """Multiply words [N, 4 C] of int8 weights by 16 C channels of the row; return sums over 16 channels, [N, C]."""
    HALF: tl.constexpr = row.dtype.element_ty == tl.float16
    a, b, c, d = _load_row(row.to(tl.pointer_type(tl.int64)), at, quads, WHOLE)
    e, f, g, h, i, j, k, m, scale = _fixed_point(a, b, c, d, HALF, EARLY)
    a, b, c, d = _four(w, BLOCK_N, C)
    found = tl.inline_asm_elementwise(
        _DOT8, "=r,r,r,r,r,r,r,r,r,r,r,r,r", [a, b, c, d, e, f, g, h, i, j, k, m], tl.int32, is_pure=True, pack=1
    )
    return found.to(tl.float32) * scale


@triton.jit
def _multiply_int8(
    row, weight, scales, program, N, K, WHOLE: tl.constexpr, ONCE: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply the row by int8 weights of BLOCK_N outputs."""
    C: tl.constexpr = BLOCK_K // 16
    W: tl.constexpr = BLOCK_K // 4
    size = K // 4
    at, quad = tl.arange(0, W), tl.arange(0, C) * 4
    outputs = _outputs(program, N, EVEN, BLOCK_N)
    words = weight.to(tl.pointer_type(tl.int32)) + (program * BLOCK_N).to(tl.int64) * size + outputs[:, None] * size
    w = _load_words(words, at, size, WHOLE)
    of_outputs = tl.load(scales + program * BLOCK_N + outputs)
    common.wait_for_previous_kernel(EARLY)
    if ONCE:
        sums = _products8(w, row, quad, size, WHOLE, EARLY, BLOCK_N, C)
    else:
        sums = tl.zeros([BLOCK_N, C], tl.float32)
        for start in range(0, size, W):
            if start > 0:
                w = _load_words(words, start + at, size, WHOLE)
            sums += _products8(w, row, start + quad, size, WHOLE, EARLY, BLOCK_N, C)
    return tl.sum(sums, 1) * of_outputs


@triton.jit
def _add_products4(
    sums, w, of_pairs, row, at, quads, WHOLE: tl.constexpr, EARLY: tl.constexpr, BLOCK_N: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Add the products of words [N, 4 C] of 4-bit weights with 32 C channels of the row to sums [N, C].

    `of_pairs` [N, C] are words of two bfloat16 scales: of the low and of the high halves.
    """
    HALF: tl.constexpr = row.dtype.element_ty == tl.float16
    row = row.to(tl.pointer_type(tl.int64))
    a, b, c, d = _load_row(row, at, quads, WHOLE)
    e, f, g, h, i, j, k, m, x_scale = _fixed_point(a, b, c, d, HALF, EARLY)
    a, b, c, d = _load_row(row, at + 8, quads, WHOLE)
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
    sums += x.to(tl.float32) * (of_pairs << 16).to(tl.float32, bitcast=True) * x_scale
    sums += y.to(tl.float32) * (of_pairs & -65536).to(tl.float32, bitcast=True) * (y_scale * 0.0625)
    return sums


@triton.jit
def _multiply_int4(
    row, weight, scales, program, N, K, WHOLE: tl.constexpr, ONCE: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply the row by 4-bit weights of BLOCK_N outputs: 8 words and a word of two scales for each 64 channels."""
    C: tl.constexpr = BLOCK_K // 32
    W: tl.constexpr = BLOCK_K // 8
    pairs = tl.cdiv(K, 64)
    size = pairs * 8
    at, c = tl.arange(0, W), tl.arange(0, C)
    outputs = _outputs(program, N, EVEN, BLOCK_N)
    words = weight.to(tl.pointer_type(tl.int32)) + (program * BLOCK_N).to(tl.int64) * size + outputs[:, None] * size
    scales += (program * BLOCK_N).to(tl.int64) * pairs
    outputs *= pairs
    w = _load_words(words, at, size, WHOLE)
    of_pairs = _load_scales(scales, outputs, c // 2, pairs, WHOLE)
    common.wait_for_previous_kernel(EARLY)
    quad = c // 2 * 16 + c % 2 * 4
    sums = tl.zeros([BLOCK_N, C], tl.float32)
    if ONCE:
        sums = _add_products4(sums, w, of_pairs, row, quad, K // 4, WHOLE, EARLY, BLOCK_N, C)
    else:
        for start in range(0, size, W):
            if start > 0:
                w = _load_words(words, start + at, size, WHOLE)
                of_pairs = _load_scales(scales, outputs, start // 8 + c // 2, pairs, WHOLE)
            sums = _add_products4(sums, w, of_pairs, row, start * 2 + quad, K // 4, WHOLE, EARLY, BLOCK_N, C)
    return tl.sum(sums, 1)


@triton.jit
def fixed_point_kernel(
    row, weight_0, scales_0, bias_0, N_0, weight_1, scales_1, bias_1, N_1, weight_2, scales_2, bias_2, N_2, output, K,
    NUMBER: tl.constexpr, HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr, BITS: tl.constexpr, ONCE: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply one row [K] by NUMBER weights; their N_0, N_1 and N_2 outputs are stored one after another.

    K is a multiple of 16. The addresses of row and weights are multiples of 16 bytes. EVEN: BLOCK_N divides all numbers
    of outputs. ONCE: a program reads all K channels at once.
    """
    program = tl.program_id(0)
    first, second = tl.cdiv(N_0, BLOCK_N), tl.cdiv(N_0, BLOCK_N) + tl.cdiv(N_1, BLOCK_N)
    weight, scales, bias, N = weight_0, scales_0, bias_0, N_0
    # The outer conditions are decided when the kernel is compiled, and remove the code of weights that are not there.
    if NUMBER > 1:  # noqa: SIM102
        if program >= first:
            weight, scales, bias, N = weight_1, scales_1, bias_1, N_1
            output += N_0
            program -= first
            if NUMBER > 2:  # noqa: SIM102
                if program >= second - first:
                    weight, scales, bias, N = weight_2, scales_2, bias_2, N_2
                    output += N_1
                    program -= second - first
    if BITS == 8:
        total = _multiply_int8(row, weight, scales, program, N, K, WHOLE, ONCE, EVEN, BLOCK_N, BLOCK_K, EARLY)
    else:
        total = _multiply_int4(row, weight, scales, program, N, K, WHOLE, ONCE, EVEN, BLOCK_N, BLOCK_K, EARLY)
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (n >= 0) if EVEN else (n < N)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + n, total.to(output.dtype.element_ty), mask=inside)
