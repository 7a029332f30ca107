"""Products of one row or of few rows with quantised weights, in Triton. Sums are float32.

A decode step is many products of one row. Each reads its weights once, and a short one ends before the GPU has reached
the full bandwidth of its memory. A joint launch of up to three layers that read the same row is one product instead of
three. A program loads its first weights before it waits for the previous kernel. Rounded weights are multiplied by a
16-bit row in fixed point (`fixed_point_triton.py`). Conversion of the weights to float32 would take longer than reading
them.

For few rows, each weight is read once, and converted in registers. A program computes BLOCK_N outputs, for 16-bit rows
on tensor cores. It multiplies in the rows' dtype, which holds int8 and 4-bit numbers exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common import tiles_triton as common
from sparsekv.kernels.common.launch import dependent_launch, power_of_two
from sparsekv.kernels.common.tiles_triton import WIDEN
from sparsekv.kernels.linear.fixed_point_triton import multiply_int4, multiply_int8
from sparsekv.kernels.linear.quantised import PAIR, TOGETHER, Int4Weight, Int8Weight, RowNorm, Weight, rms_norm

_PAIR = tl.constexpr(PAIR)  # input channels of a pair of groups: the low and the high four bits of 32 bytes


@triton.jit
def _row_tile(row, at, K, WHOLE: tl.constexpr):
    """Load some channels of the row as float32."""
    return (tl.load(row + at) if WHOLE else tl.load(row + at, mask=at < K, other=0.0)).to(tl.float32)


@triton.jit
def _load_weights(weights, at, K, WHOLE: tl.constexpr):
    """Load weights [N, BLOCK_K], whose outputs begin at `weights` [N]."""
    weights = weights[:, None] + at[None, :]
    if WHOLE:
        return tl.load(weights, eviction_policy="evict_first")
    else:
        return tl.load(weights, mask=(at < K)[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def _products(w, row, norm, at, K, NORM: tl.constexpr, WHOLE: tl.constexpr):
    """Multiply weights [N, BLOCK_K] by some channels of the row; also return these channels' squares, or 0."""
    x = _row_tile(row, at, K, WHOLE)
    if NORM:
        return w.to(tl.float32) * (x * _row_tile(norm, at, K, WHOLE))[None, :], x * x
    else:
        return w.to(tl.float32) * x[None, :], 0.0


@triton.jit
def _multiply(
    row, norm, weights, scales, K, NORM: tl.constexpr, WHOLE: tl.constexpr, BITS: tl.constexpr,
    BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply a row by int8 or unrounded weights in float32; as `multiply_int8` of `fixed_point_triton.py`."""
    k = tl.arange(0, BLOCK_K)
    w = _load_weights(weights, k, K, WHOLE)
    common.wait_for_previous_kernel(EARLY)
    sums, squares = _products(w, row, norm, k, K, NORM, WHOLE)
    for first in range(BLOCK_K, K, BLOCK_K):
        w = _load_weights(weights, first + k, K, WHOLE)
        more, of_row = _products(w, row, norm, first + k, K, NORM, WHOLE)
        sums += more
        squares += of_row
    total = tl.sum(sums, 1)
    if BITS == 8:
        total *= tl.load(scales)
    return total, tl.sum(squares) if NORM else 0.0


@triton.jit
def _multiply_int4(
    row, packed, scales, K, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Multiply a row by 4-bit weights [pairs, 32] of each output in float32; a scale is a word of two bfloat16."""
    BLOCK: tl.constexpr = BLOCK_K // _PAIR
    j, pairs = tl.arange(0, BLOCK * 32), tl.cdiv(K, _PAIR)
    sixteen = tl.arange(0, BLOCK * 2) // 2
    low_k = j // 32 * _PAIR + j % 32
    sums = tl.zeros([BLOCK_N, BLOCK * 2], tl.float32)
    common.wait_for_previous_kernel(EARLY)
    for first in range(0, pairs, BLOCK):
        k = first * _PAIR + low_k
        here = (k < K)[None, :]
        there = (first + sixteen < pairs)[None, :]
        at, of_pairs = packed[:, None] + (first * 32 + j)[None, :], scales[:, None] + (first + sixteen)[None, :]
        w = tl.load(at) if WHOLE else tl.load(at, mask=here, other=0)
        words = tl.load(of_pairs) if WHOLE else tl.load(of_pairs, mask=there, other=0)
        x, y = _row_tile(row, k, K, WHOLE), _row_tile(row, k + 32, K, WHOLE)
        low, high = ((w & 15).to(tl.float32) - 8.0) * x[None, :], ((w >> 4).to(tl.float32) - 8.0) * y[None, :]
        low = tl.sum(tl.reshape(low, [BLOCK_N, BLOCK * 2, 16]), 2)
        high = tl.sum(tl.reshape(high, [BLOCK_N, BLOCK * 2, 16]), 2)
        sums += low * (words << 16).to(tl.float32, bitcast=True) + high * (words & -65536).to(tl.float32, bitcast=True)
    return tl.sum(sums, 1)


@triton.jit
def _one_row_kernel(
    row, norm, epsilon, weight_0, scales_0, bias_0, N_0, weight_1, scales_1, bias_1, N_1, weight_2, scales_2, bias_2,
    N_2, residual, output, K,
    NUMBER: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    WHOLE: tl.constexpr, BITS: tl.constexpr, FIXED: tl.constexpr, ONCE: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply one row [K] by NUMBER weights; their N_0, N_1 and N_2 outputs are stored one after another.

    NORM, GATED, RESIDUAL: as `one_row_linears`. With GATED, even outputs of a program are of the first weight, and odd
    ones of the second. FIXED: the row is multiplied in fixed point. ONCE: a program reads all K channels at once. EVEN:
    the numbers of outputs are multiples of those of a program.
    """
    PART: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    program, lanes = tl.program_id(0), tl.arange(0, BLOCK_N)
    weight, scales, bias, N = weight_0, scales_0, bias_0, N_0
    if GATED:
        is_up = lanes % 2 == 1
        lanes = lanes // 2
        weight = tl.where(is_up, weight_1, weight_0)
        scales = tl.where(is_up, scales_1, scales_0)
        bias = tl.where(is_up, bias_1, bias_0)
    elif NUMBER > 1:
        first, second = tl.cdiv(N_0, BLOCK_N), tl.cdiv(N_0, BLOCK_N) + tl.cdiv(N_1, BLOCK_N)
        if program >= first:
            weight, scales, bias, N = weight_1, scales_1, bias_1, N_1
            residual, output = residual + N_0, output + N_0
            program -= first
            if NUMBER > 2:  # noqa: SIM102  # decided when the kernel is compiled
                if program >= second - first:
                    weight, scales, bias, N = weight_2, scales_2, bias_2, N_2
                    residual, output = residual + N_1, output + N_1
                    program -= second - first
    start = program * PART
    if not EVEN:  # the last output stands for those beyond it
        lanes = tl.minimum(lanes, N - 1 - start)
    bias += start + lanes
    if BITS == 4:
        pairs = tl.cdiv(K, _PAIR)
        scales += start.to(tl.int64) * pairs + lanes * pairs
        if FIXED:
            weights = weight.to(tl.pointer_type(tl.int32)) + start.to(tl.int64) * (pairs * 8) + lanes * (pairs * 8)
            total, squares = multiply_int4(
                row, norm, weights, scales, K, NORM, WHOLE, ONCE, BLOCK_N, BLOCK_K, EARLY
            )  # fmt: skip
        else:
            weights = weight + start.to(tl.int64) * (pairs * 32) + lanes * (pairs * 32)
            total, squares = _multiply_int4(row, weights, scales, K, WHOLE, BLOCK_N, BLOCK_K, EARLY), 0.0
    else:
        scales += start + lanes
        if FIXED:
            weights = weight.to(tl.pointer_type(tl.int32)) + start.to(tl.int64) * (K // 4) + lanes * (K // 4)
            total, squares = multiply_int8(
                row, norm, weights, scales, K, NORM, WHOLE, ONCE, BLOCK_N, BLOCK_K, EARLY
            )  # fmt: skip
        else:
            weights = weight + start.to(tl.int64) * K + lanes * K
            total, squares = _multiply(row, norm, weights, scales, K, NORM, WHOLE, BITS, BLOCK_K, EARLY)
    if NORM:
        total *= tl.rsqrt(squares / K + epsilon)
    if HAS_BIAS:
        total += tl.load(bias).to(tl.float32)
    n = start + tl.arange(0, PART)
    inside = (n >= 0) if EVEN else (n < N)
    dtype: tl.constexpr = output.dtype.element_ty
    if GATED:
        gate, up = tl.split(tl.reshape(total.to(dtype).to(tl.float32), [PART, 2]))
        total = gate / (1 + tl.exp(-gate)) * up
    if RESIDUAL:
        total = total.to(dtype).to(tl.float32) + tl.load(residual + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + n, total.to(dtype), mask=inside)


@dataclass(frozen=True)
class RowTile:
    """Outputs of a program, input channels that it reads at a time, and its warps."""

    outputs: int
    channels: int
    warps: int


ROW_TILE = RowTile(4, 1024, 4)
"""Tile of weights that are not rounded, and of rows that `fixed_point_fits` refuses."""


def fixed_point_tile(bits, channels, layers):
    """Choose the fastest tile on an H200 for the shapes of an 8B: 4,096 channels, and 12,288 for the `down` layer.

    With int8 weights, the joint launch of queries, keys and values takes 6.2 us with 16 outputs and 7.5 us with 8. The
    product of 12,288 channels takes 12.2 us with 4,096 channels at a time and 13.7 us with 2,048.
    """
    if bits == 4:
        return RowTile(16, 4096, 4)
    if channels >= 8192:
        return RowTile(8, 4096, 4)
    return RowTile(8 if layers == 1 else 16, 2048, 4)


def fixed_point_fits(row, weights):
    """Whether the weights' numbers can be multiplied by the row in fixed point, by loads of 16 bytes at a time."""
    return (
        weights[0].dtype in (torch.int8, torch.uint8)
        and row.dtype in (torch.bfloat16, torch.float16)
        and row.shape[1] % 16 == 0
        and all(one.data_ptr() % 16 == 0 for one in (row, *weights))
    )


def _scales_fixed_point(row: torch.Tensor, norm: RowNorm) -> bool:
    """Whether the row can be multiplied by the norm's weight in pairs: in float16 the products might overflow."""
    able = not row.is_cuda or torch.cuda.get_device_capability(row.device) >= (8, 0)
    return able and row.dtype == norm.weight.dtype == torch.bfloat16 and norm.weight.data_ptr() % 16 == 0


def one_row_linears_triton(
    row: torch.Tensor,
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    *,
    norm: RowNorm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `one_row_linears` on a GPU in one launch; allocates the output alone.

    The norm has launches of its own if the weights are rounded, unless a bfloat16 row is multiplied in fixed point.
    """
    row, bits, K, counts = row.contiguous(), _bits(weights[0]), row.shape[1], [_outputs_of(one) for one in weights]
    more = [_tensors(*pair) for pair in zip(weights, biases, strict=True)]
    fixed = fixed_point_fits(row, [numbers for numbers, *_ in more])
    if norm is not None and bits < 16 and not (fixed and _scales_fixed_point(row, norm)):
        row, norm = rms_norm(row, norm), None
    output = row.new_empty(1, counts[0] if gated else sum(counts))
    slots = [part for tensors, count in zip(more, counts, strict=True) for part in (*tensors, count)]
    slots += (*more[0], 0) * (TOGETHER - len(weights))
    tile = fixed_point_tile(bits, K, len(weights)) if fixed else ROW_TILE
    each = tile.outputs // 2 if gated else tile.outputs
    _one_row_kernel[(sum(triton.cdiv(count, each) for count in counts[: 1 if gated else None]),)](
        row, row if norm is None else norm.weight, 0.0 if norm is None else norm.epsilon,
        *slots, row if residual is None else residual.contiguous(), output, K,
        NUMBER=len(weights), HAS_BIAS=biases[0] is not None, NORM=norm is not None, GATED=gated,
        RESIDUAL=residual is not None, WHOLE=K % tile.channels == 0, BITS=bits, FIXED=fixed, ONCE=tile.channels >= K,
        EVEN=all(count % each == 0 for count in counts), BLOCK_N=tile.outputs, BLOCK_K=tile.channels,
        num_warps=tile.warps, **dependent_launch(row.device),
    )  # fmt: skip
    return output


def _bits(weight: Weight) -> int:
    return 16 if isinstance(weight, torch.Tensor) else weight.bits


def _outputs_of(weight: Weight) -> int:
    return len(weight if isinstance(weight, torch.Tensor) else weight.numbers)


def _tensors(weight: Weight, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tensors of weights, scales and bias; a tensor that is missing is replaced by the weights."""
    match weight:
        case Int8Weight(numbers, scales):
            pass
        case Int4Weight(numbers, scales):
            scales = scales.view(torch.int32)
        case _:
            numbers = scales = weight
    return numbers, scales, numbers if bias is None else bias


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
    k = part[:, None] * _PAIR + j[None, :]
    rows += r[None, None, :] * K + k[:, :, None]
    common.wait_for_previous_kernel(EARLY)
    for first in tl.range(0, PAIRS, PARTS, num_stages=STAGES):
        within = inside[None, :] if WHOLE else inside[None, :] & (first + part < PAIRS)[:, None]
        w = tl.load(packed + first * 32, mask=within[:, :, None], other=0)
        words = tl.load(scales + first, mask=within, other=0)
        if WHOLE:
            x = tl.load(rows + first * _PAIR, mask=(r < R)[None, None, :], other=0.0)
            y = tl.load(rows + first * _PAIR + 32, mask=(r < R)[None, None, :], other=0.0)
        else:
            there = first * _PAIR + k
            x = tl.load(rows + first * _PAIR, mask=(r < R)[None, None, :] & (there < K)[:, :, None], other=0.0)
            y = tl.load(
                rows + first * _PAIR + 32, mask=(r < R)[None, None, :] & (there + 32 < K)[:, :, None], other=0.0
            )
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
        PARTS=tile.channels // PAIR, ROWS=_padded(R), **options,
    )  # fmt: skip
    return output


def _padded(rows):
    """Round the number of rows up to 8 or 16, because tensor cores multiply 8 columns at a time."""
    return 8 if rows <= 8 else 16


def _ahead(tile, size):
    """Return the kernel option AHEAD, the bytes of weights that a program prefetches.

    The `tile.outputs` outputs of a program have `size` bytes of weights each.
    """
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
