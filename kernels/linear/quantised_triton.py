"""Products of few rows with quantised weights, in Triton: each weight is read once, and converted in registers.

A program computes BLOCK_N outputs, for 16-bit rows on tensor cores. It multiplies in the rows' dtype, which holds int8
and 4-bit numbers exactly. Sums are float32. One row alone is multiplied by `one_row_linears_triton`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common import tiles_triton as common
from sparsekv.kernels.common.launch import dependent_launch, power_of_two
from sparsekv.kernels.common.tiles_triton import WIDEN
from sparsekv.kernels.linear.one_row_triton import one_row_linears_triton

PAIR = tl.constexpr(64)  # input channels of a pair of groups: the low and the high four bits of 32 bytes

# Conversion of four int8 to bfloat16, which has 8 significant bits: 128 plus the byte's low 7 bits, minus 128, or minus
# 256 if the byte's highest bit is set.
_BFLOATS = tl.constexpr(
    """{ .reg .b32 a, b, c, d, one; mov.b32 one, 0x3F803F80;
    prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;
    lop3.b32 c, a, 0x00800080, 0xC300C300, 0xEA; lop3.b32 d, b, 0x00800080, 0xC300C300, 0xEA;
    lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA; lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, a, one, c; fma.rn.bf16x2 $1, b, one, d; }"""
)
_HALVES = tl.constexpr(
    """{ .reg .b32 u, middle; xor.b32 u, $2, 0x80808080; mov.b32 middle, 0x64806480;
    prmt.b32 $0, u, 0x64646464, 0x4140; prmt.b32 $1, u, 0x64646464, 0x4342;
    sub.f16x2 $0, $0, middle; sub.f16x2 $1, $1, middle; }"""
)
_BFLOAT_NIBBLES = tl.constexpr(
    """{ .reg .b32 low, high, a, b, c, d, one, eight; mov.b32 one, 0x3F803F80; mov.b32 eight, 0xC308C308;
    and.b32 low, $4, 0x0F0F0F0F; shr.u32 high, $4, 4; and.b32 high, high, 0x0F0F0F0F;
    prmt.b32 a, low, 0x43434343, 0x4140; prmt.b32 b, low, 0x43434343, 0x4342;
    prmt.b32 c, high, 0x43434343, 0x4140; prmt.b32 d, high, 0x43434343, 0x4342;
    fma.rn.bf16x2 $0, a, one, eight; fma.rn.bf16x2 $1, b, one, eight;
    fma.rn.bf16x2 $2, c, one, eight; fma.rn.bf16x2 $3, d, one, eight; }"""
)
_HALF_NIBBLES = tl.constexpr(
    """{ .reg .b32 low, high, eight; mov.b32 eight, 0x64086408;
    and.b32 low, $4, 0x0F0F0F0F; shr.u32 high, $4, 4; and.b32 high, high, 0x0F0F0F0F;
    prmt.b32 $0, low, 0x64646464, 0x4140; prmt.b32 $1, low, 0x64646464, 0x4342;
    prmt.b32 $2, high, 0x64646464, 0x4140; prmt.b32 $3, high, 0x64646464, 0x4342;
    sub.f16x2 $0, $0, eight; sub.f16x2 $1, $1, eight; sub.f16x2 $2, $2, eight; sub.f16x2 $3, $3, eight; }"""
)


@triton.jit
def _as_rows(weights, dtype: tl.constexpr):
    """Convert int8 weights to the dtype of rows, exactly."""
    if WIDEN or tl.float32 == dtype:
        return weights.to(tl.float32)
    elif tl.bfloat16 == dtype:
        return tl.inline_asm_elementwise(_BFLOATS, "=r,=r,r", [weights], tl.bfloat16, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(_HALVES, "=r,=r,r", [weights], tl.float16, is_pure=True, pack=4)


@triton.jit
def _prefetch(weight, N, size, AHEAD: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr):
    """Prefetch up to AHEAD bytes of a program's weights, rows of `size` bytes, while the previous kernel still runs."""
    first = tl.program_id(0) * BLOCK_N
    start = weight + first.to(tl.int64) * size
    common.prefetch(start, tl.minimum(N - first, BLOCK_N) * size, AHEAD, 1, EARLY)


@triton.jit
def _int8_rows_kernel(
    rows, weight, scales, bias, output, R, N, K, HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply up to ROWS rows [R, K] by int8 weights [N, K]; PARTS warps share the input channels of each output."""
    n, r = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    part, j = tl.arange(0, PARTS), tl.arange(0, BLOCK_K)
    inside = n < N
    dtype: tl.constexpr = rows.dtype.element_ty
    sums = tl.zeros([PARTS, BLOCK_N, ROWS], tl.float32)
    _prefetch(weight, N, K, AHEAD, BLOCK_N, EARLY)
    k = part[:, None] * BLOCK_K + j[None, :]
    weight += n.to(tl.int64)[None, :, None] * K + k[:, None, :]
    rows += r[None, None, :] * K + k[:, :, None]
    common.wait_for_previous_kernel(EARLY)
    for first in tl.range(0, K, PARTS * BLOCK_K, num_stages=STAGES):
        if WHOLE:
            w = tl.load(weight + first, mask=inside[None, :, None], other=0)
            x = tl.load(rows + first, mask=(r < R)[None, None, :], other=0.0)
        else:
            there = first + k < K
            w = tl.load(weight + first, mask=inside[None, :, None] & there[:, None, :], other=0)
            x = tl.load(rows + first, mask=(r < R)[None, None, :] & there[:, :, None], other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
        sums = tl.dot(_as_rows(w, dtype), x, sums, input_precision="ieee" if tl.float32 == dtype else "tf32")
    total = tl.sum(sums, 0) * tl.load(scales + n, mask=inside, other=0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    place = r[None, :] * N + n[:, None]
    tl.store(output + place, total.to(output.dtype.element_ty), mask=inside[:, None] & (r < R)[None, :])


@triton.jit
def _nibbles_as_rows(packed, dtype: tl.constexpr):
    """Subtract 8 from the low and from the high four bits of bytes; return both exactly, in the dtype of rows."""
    if WIDEN or tl.float32 == dtype:
        return (packed & 15).to(tl.float32) - 8.0, (packed >> 4).to(tl.float32) - 8.0
    elif tl.bfloat16 == dtype:
        return tl.inline_asm_elementwise(
            _BFLOAT_NIBBLES, "=r,=r,=r,=r,r", [packed], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            _HALF_NIBBLES, "=r,=r,=r,=r,r", [packed], (tl.float16, tl.float16), is_pure=True, pack=4
        )


@triton.jit
def _two_scales(words):
    """Unpack words of two bfloat16 scales."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _int4_rows_kernel(
    rows, packed, scales, bias, output, R, N, K, PAIRS, HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply up to ROWS rows [R, K] by 4-bit weights [N, PAIRS, 32], PARTS pairs at a time.

    `scales` [N, PAIRS] are words of two bfloat16.
    """
    n, r = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    part, j = tl.arange(0, PARTS), tl.arange(0, 32)
    inside = n < N
    dtype: tl.constexpr = rows.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if tl.float32 == dtype else "tf32"
    sums = tl.zeros([PARTS, BLOCK_N, ROWS], tl.float32)
    nothing = tl.zeros([PARTS, BLOCK_N, ROWS], tl.float32)
    _prefetch(packed, N, PAIRS * 32, AHEAD, BLOCK_N, EARLY)
    pair = n.to(tl.int64)[None, :] * PAIRS + part[:, None]
    packed += pair[:, :, None] * 32 + j[None, None, :]
    scales += pair
    k = part[:, None] * PAIR + j[None, :]
    rows += r[None, None, :] * K + k[:, :, None]
    common.wait_for_previous_kernel(EARLY)
    for first in tl.range(0, PAIRS, PARTS, num_stages=STAGES):
        within = inside[None, :] if WHOLE else inside[None, :] & (first + part < PAIRS)[:, None]
        w = tl.load(packed + first * 32, mask=within[:, :, None], other=0)
        words = tl.load(scales + first, mask=within, other=0)
        if WHOLE:
            x = tl.load(rows + first * PAIR, mask=(r < R)[None, None, :], other=0.0)
            y = tl.load(rows + first * PAIR + 32, mask=(r < R)[None, None, :], other=0.0)
        else:
            there = first * PAIR + k
            x = tl.load(rows + first * PAIR, mask=(r < R)[None, None, :] & (there < K)[:, :, None], other=0.0)
            y = tl.load(rows + first * PAIR + 32, mask=(r < R)[None, None, :] & (there + 32 < K)[:, :, None], other=0.0)
        if WIDEN:
            x, y = x.to(tl.float32), y.to(tl.float32)
        low, high = _nibbles_as_rows(w, dtype)
        of_low, of_high = _two_scales(words)
        sums += tl.dot(low, x, nothing, input_precision=PRECISION) * of_low[:, :, None]
        sums += tl.dot(high, y, nothing, input_precision=PRECISION) * of_high[:, :, None]
    total = tl.sum(sums, 0)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    place = r[None, :] * N + n[:, None]
    tl.store(output + place, total.to(output.dtype.element_ty), mask=inside[:, None] & (r < R)[None, :])


@dataclass(frozen=True)
class Tile:
    """Outputs of a program, input channels that it reads at a time, its warps, and its pipeline stages.

    The channels are divided among the warps.
    """

    outputs: int
    channels: int
    warps: int
    stages: int


TILES: dict[int, list[tuple[int, Tile]]] = {
    8: [(0, Tile(16, 512, 4, 4)), (2048, Tile(32, 512, 4, 4))],
    4: [(0, Tile(16, 512, 4, 4)), (2048, Tile(32, 512, 4, 4)), (8192, Tile(64, 256, 4, 3))],
}
"""Tiles by the bits of a weight: pairs of the fewest outputs and the tile from that number of outputs on."""

AHEAD = 32_768
"""Maximum number of bytes that a program prefetches while the previous kernel still runs."""


def tile_for(bits, outputs):
    """Choose the tile for weights of `bits` bits from the number of outputs."""
    return [tile for least, tile in TILES[bits] if outputs >= least][-1]


def int8_linear_triton(rows, weight, bias):
    (R, K), N = rows.shape, len(weight.numbers)
    if R == 1:
        return one_row_linears_triton(rows, [weight], [bias])
    rows, output, tile = rows.contiguous(), rows.new_empty(R, N), tile_for(8, N)
    options = _options(rows, K, bias, tile) | _ahead(tile, K)
    _int8_rows_kernel[(triton.cdiv(N, tile.outputs),)](
        rows, weight.numbers, weight.scales, output if bias is None else bias, output, R, N, K, PARTS=tile.warps,
        BLOCK_K=tile.channels // tile.warps, ROWS=_padded(R), **options,
    )  # fmt: skip
    return output


def int4_linear_triton(rows, weight, bias):
    (R, K), (N, pairs, size) = rows.shape, weight.numbers.shape
    if R == 1:
        return one_row_linears_triton(rows, [weight], [bias])
    rows, output, tile = rows.contiguous(), rows.new_empty(R, N), tile_for(4, N)
    options = _options(rows, K, bias, tile) | _ahead(tile, pairs * size)
    _int4_rows_kernel[(triton.cdiv(N, tile.outputs),)](
        rows, weight.numbers, weight.scales.view(torch.int32), output if bias is None else bias, output, R, N, K, pairs,
        PARTS=tile.channels // PAIR.value, ROWS=_padded(R), **options,
    )  # fmt: skip
    return output


def _padded(rows):
    """Round the number of rows up to 8 or 16, because tensor cores multiply 8 columns at a time."""
    return 8 if rows <= 8 else 16


def _ahead(tile, size):
    """Return the option AHEAD: the bytes of weights that a program prefetches, at `size` bytes for each output."""
    return {"AHEAD": max(128, min(power_of_two(tile.outputs * size), AHEAD))}


def _options(rows, channels, bias, tile):
    return {
        "HAS_BIAS": bias is not None,
        "WHOLE": channels % tile.channels == 0,
        "BLOCK_N": tile.outputs,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        **dependent_launch(rows.device),
    }
