"""Products with rounded weights, by each of their forms, against float64; and the error of rounding itself."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory, with_threads
from support.ptx import ptx_by_numpy
from support.random_tensors import normal
from support.reference import assert_close, relative_error
from support.spawned import run_together
from support.without_numba import check_product
from torch.nn.functional import silu

from sparsekv.kernels.common.launch import dependent_launch
from sparsekv.kernels.common.on_cpu import compiled_kernels
from sparsekv.kernels.linear import quantised, quantised_triton
from sparsekv.kernels.linear.fixed_point_triton import peak
from sparsekv.kernels.linear.quantised import (
    GROUP,
    PAIR,
    Int4Weight,
    Int8Weight,
    RowNorm,
    int4_linear,
    int8_linear,
    multiply,
    one_row_linears,
    round_to_int4,
    round_to_int8,
)
from sparsekv.kernels.linear.quantised_triton import (
    TILES,
    int4_linear_triton,
    int8_linear_triton,
    one_row_linears_triton,
)

pytestmark = compiled_or_interpreted
Weight = Int8Weight | Int4Weight
Product = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def inline_ptx() -> Iterator[None]:
    """Without a GPU, numpy computes the kernels' inline PTX."""
    if DEVICE.type == "cuda":
        yield
    else:
        with ptx_by_numpy():
            yield


# A dtype's rounding of the output. Products and sums are float32.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
by_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
by_bits = pytest.mark.parametrize("bits", [8, 4], ids=["int8", "int4"])
by_shape = pytest.mark.parametrize(
    "shape",
    [(1, 1), (5, 40), (33, 100), (64, 1024), (70, 1100), (130, 2176)],
    ids=lambda shape: f"{shape[0]}x{shape[1]}",
)
by_rows = pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 16, 17])


def rounded(bits: int, outputs: int, channels: int) -> Weight:
    weights = 0.05 * normal(outputs + channels, outputs, channels)
    return round_to_int8(weights) if bits == 8 else round_to_int4(weights)


def moved(weight: Weight) -> Weight:
    numbers, scales = weight.numbers.to(DEVICE), weight.scales.to(DEVICE)
    return (
        Int8Weight(numbers, scales) if isinstance(weight, Int8Weight) else Int4Weight(numbers, scales, weight.channels)
    )


def inputs(rows: int, weight: Weight, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [R, K], and a bias [N] for odd numbers of rows."""
    bias = normal(2, len(weight.scales)).to(dtype) if rows % 2 else None
    return normal(1, rows, weight.channels).to(dtype), bias


def exact(rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    products = rows.double() @ weight.restored(torch.float64).T
    return products if bias is None else products + bias.double()


def by_kernel(rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    kernel: Any = int8_linear_triton if isinstance(weight, Int8Weight) else int4_linear_triton
    with poisoned_memory():
        output: torch.Tensor = kernel(rows.to(DEVICE), moved(weight), None if bias is None else bias.to(DEVICE))
    return output.cpu()


@pytest.mark.thinned
@by_bits
@by_dtype
@by_shape
@by_rows
def test_definition(bits: int, dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    """The definition rounds the weights to the rows' dtype."""
    weight = rounded(bits, *shape)
    given, bias = inputs(rows, weight, dtype)
    defined: Product = int8_linear.reference if bits == 8 else int4_linear.reference
    assert_close(defined(given, weight, bias), exact(given, weight, bias), 2 * TOLERANCE[dtype])


@pytest.mark.thinned
@by_bits
@by_dtype
@by_shape
@pytest.mark.parametrize("rows", [1, 2, 9, 16])
def test_kernel(bits: int, dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    weight = rounded(bits, *shape)
    given, bias = inputs(rows, weight, dtype)
    assert_close(by_kernel(given, weight, bias), exact(given, weight, bias), TOLERANCE[dtype])


@pytest.mark.thinned
@by_bits
@by_dtype
def test_every_tile_of_the_kernel(bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """More outputs than one program computes, and channels that no tile divides."""
    weight = rounded(bits, 70, 1100)
    given, bias = inputs(5, weight, dtype)
    for _, tile in TILES[bits]:
        monkeypatch.setattr(quantised_triton, "tile_for", lambda *_, tile=tile: tile)
        assert_close(by_kernel(given, weight, bias), exact(given, weight, bias), TOLERANCE[dtype])


@pytest.mark.thinned
@pytest.mark.parametrize("multiplied", [one_row_linears.reference, one_row_linears_triton], ids=["torch", "kernel"])
@pytest.mark.parametrize("bits", [4, 8, 16])
@by_dtype
@pytest.mark.parametrize("channels", [40, 2048, 2176])
@pytest.mark.parametrize("outputs", [(5,), (70, 3), (64, 8, 33)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_layers_of_one_row_side_by_side(
    multiplied: Product, bits: int, dtype: torch.dtype, channels: int, outputs: tuple[int, ...], biased: bool
) -> None:
    row = normal(1, 1, channels).to(dtype)
    weights = [
        rounded(bits, count, channels) if bits < 16 else (0.05 * normal(count, count, channels)).to(dtype)
        for count in outputs
    ]
    biases = [normal(count, count).to(dtype) if biased else None for count in outputs]
    moved_weights = [one.to(DEVICE) if isinstance(one, torch.Tensor) else moved(one) for one in weights]
    with poisoned_memory():
        found = multiplied(row.to(DEVICE), moved_weights, [None if one is None else one.to(DEVICE) for one in biases])
    each = [
        row.double() @ one.double().T + (0 if bias is None else bias.double())
        if isinstance(one, torch.Tensor)
        else exact(row, one, bias)
        for one, bias in zip(weights, biases, strict=True)
    ]
    kernel = multiplied is one_row_linears_triton
    assert_close(found.cpu(), torch.cat(each, 1), TOLERANCE[dtype] if kernel else 2 * TOLERANCE[dtype])


@pytest.mark.thinned
@pytest.mark.parametrize("multiplied", [one_row_linears.reference, one_row_linears_triton], ids=["torch", "kernel"])
@pytest.mark.parametrize("bits", [4, 8, 16])
@by_dtype
@pytest.mark.parametrize("channels", [40, 576, 2048, 4160])
@pytest.mark.parametrize("outputs", [(33, 33), (64, 64), (70, 3), (5,)], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_norm_gate_and_residual_of_a_product(
    multiplied: Product, bits: int, dtype: torch.dtype, channels: int, outputs: tuple[int, ...], normed: bool,
    gated: bool, added: bool, biased: bool,
) -> None:  # fmt: skip
    gated = gated and len(set(outputs)) < len(outputs)
    row, weight = 3 * normal(1, 1, channels), 1 + normal(2, channels)
    row[0, 3] = 100
    row, weight = row.to(dtype), weight.to(dtype)
    weights = [
        rounded(bits, count, channels) if bits < 16 else (0.05 * normal(place, count, channels)).to(dtype)
        for place, count in enumerate(outputs)
    ]
    biases = [normal(count, count).to(dtype) if biased else None for count in outputs]
    residual = normal(3, 1, outputs[0] if gated else sum(outputs)).to(dtype) if added else None

    def on_device(one: torch.Tensor | None) -> torch.Tensor | None:
        return None if one is None else one.to(DEVICE)

    with poisoned_memory():
        found = multiplied(
            row.to(DEVICE),
            [one.to(DEVICE) if isinstance(one, torch.Tensor) else moved(one) for one in weights],
            [on_device(one) for one in biases],
            norm=RowNorm(weight.to(DEVICE), 1e-3) if normed else None,
            gated=gated,
            residual=on_device(residual),
        )
    scale = torch.rsqrt(row.double().square().mean() + 1e-3)
    given = row.double() * scale * weight.double() if normed else row.double()
    each = [
        given @ (one.double() if isinstance(one, torch.Tensor) else one.restored(torch.float64)).T
        + (0 if bias is None else bias.double())
        for one, bias in zip(weights, biases, strict=True)
    ]
    expected = silu(each[0]) * each[1] if gated else torch.cat(each, 1)
    expected = expected if residual is None else expected + residual.double()
    assert_close(found.cpu(), expected, (2 if multiplied is one_row_linears_triton else 4) * TOLERANCE[dtype])


def fixed_point(row: torch.Tensor) -> torch.Tensor:
    """Round each 16 channels of a row to 16-bit integers times a power of two, at least 2^-126; return float64."""
    parts = row.double().unflatten(-1, (-1, 16))
    exponent = torch.frexp(parts.abs().amax(-1, keepdim=True)).exponent  # magnitudes are below 2 ** exponent
    unit = torch.pow(2.0, (exponent - 15).clamp(min=-126).double())
    return ((parts / unit).round() * unit).flatten(-2)


HALVES = [torch.bfloat16, torch.float16]
by_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda row: row,
    "outliers": lambda row: row * torch.where(torch.arange(row.shape[1]) % 100 == 7, 1000, 1),
    "heavy tails": lambda row: row**5,
    "zeros": torch.zeros_like,
}
"""Rows from normal rows, by name."""
TINY = {torch.bfloat16: 2.0**-118, torch.float16: 2.0**-20}
"""Factor that makes some numbers subnormal."""


def unit_weight(bits: int, channels: torch.Tensor, count: int) -> Weight:
    """Weights [N, `count`] that are 1 in the channel of each output, and 0 otherwise."""
    dense = torch.zeros(len(channels), -(-count // PAIR) * PAIR, dtype=torch.int8)
    dense[torch.arange(len(channels)), channels] = 1
    if bits == 8:
        return Int8Weight(dense[:, :count].contiguous(), torch.ones(len(channels)))
    low, high = (dense + 8).to(torch.uint8).unflatten(1, (-1, 2, GROUP)).unbind(2)
    return Int4Weight(low | high << 4, torch.ones(*low.shape[:2], 2, dtype=torch.bfloat16), count)


def row_and_unit_weight(bits: int, channels: int) -> tuple[torch.Tensor, torch.Tensor, Weight]:
    """A row with outliers, 40 of its channels, and weights of which each output is one of these channels."""
    some = torch.randperm(channels, generator=torch.Generator().manual_seed(channels))[:40]
    return ROWS["outliers"](normal(3, 1, channels)), some, unit_weight(bits, some, channels)


@pytest.mark.thinned
@by_bits
@by_half
@pytest.mark.parametrize("channels", [48, 2048, 4160, 8208])
@pytest.mark.parametrize("kind", [*ROWS, "tiny"])
def test_one_row_is_multiplied_in_fixed_point(bits: int, dtype: torch.dtype, channels: int, kind: str) -> None:
    _, some, weight = row_and_unit_weight(bits, channels)
    row = normal(4, 1, channels)
    row = (row * TINY[dtype] if kind == "tiny" else ROWS[kind](row)).to(dtype)
    assert torch.equal(by_kernel(row, weight, None), fixed_point(row)[:, some].to(dtype))


@by_bits
@by_half
def test_a_row_that_is_not_aligned_is_not_rounded(bits: int, dtype: torch.dtype) -> None:
    row, some, weight = row_and_unit_weight(bits, 64)
    room = torch.zeros(1, 65, dtype=dtype, device=DEVICE)
    room[:, 1:] = row
    kernel: Any = int8_linear_triton if bits == 8 else int4_linear_triton
    assert torch.equal(kernel(room[:, 1:], moved(weight), None).cpu(), row.to(dtype)[:, some])


@by_bits
@pytest.mark.parametrize("channels", [40, 64])
def test_float32_rows_and_odd_channels_are_not_rounded(bits: int, channels: int) -> None:
    row, some, weight = row_and_unit_weight(bits, channels)
    row = row.to(torch.float32 if channels % 16 == 0 else torch.bfloat16)
    assert torch.equal(by_kernel(row, weight, None), row[:, some])


@by_bits
@by_half
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("channels", [64, 4160])
def test_a_number_that_is_not_finite_reaches_every_output(
    bits: int, dtype: torch.dtype, number: float, channels: int
) -> None:
    row = normal(1, 1, channels).to(dtype)
    row[0, channels - 3] = number
    assert not bool(by_kernel(row, rounded(bits, 21, channels), None).isfinite().any())


@pytest.mark.thinned
@by_bits
@by_half
@pytest.mark.parametrize("channels", [64, 576, 896, 1536, 4864, 11008])
@pytest.mark.parametrize("outputs", [(16,), (33, 5), (48, 16, 7), (32, 16, 16)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ROWS)
def test_layers_of_one_row_in_fixed_point(
    bits: int, dtype: torch.dtype, channels: int, outputs: tuple[int, ...], biased: bool, kind: str
) -> None:
    row = ROWS[kind](normal(1, 1, channels)).to(dtype)
    weights = [rounded(bits, count, channels) for count in outputs]
    biases = [normal(count, count).to(dtype) if biased else None for count in outputs]
    given_biases = [None if one is None else one.to(DEVICE) for one in biases]
    with poisoned_memory():
        found = one_row_linears_triton(row.to(DEVICE), [moved(one) for one in weights], given_biases)
    each = [exact(row, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    assert_close(found.cpu(), torch.cat(each, 1), TOLERANCE[dtype])


@triton.jit
def _peaks_kernel(quads, found, N: tl.constexpr, EARLY: tl.constexpr):
    n = tl.arange(0, N)
    quads += n * 4
    peaks = peak(tl.load(quads), tl.load(quads + 1), tl.load(quads + 2), tl.load(quads + 3), EARLY)
    tl.store(found + n, peaks)


@pytest.mark.parametrize("early", [False, True] if DEVICE.type == "cpu" else [False, dependent_launch(DEVICE)["EARLY"]])
def test_largest_magnitude_of_16_floats(early: bool) -> None:
    bits = torch.randint(-(2**15), 2**15, (64, 16), generator=torch.Generator().manual_seed(0)).short()
    found = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    _peaks_kernel[(1,)](bits.view(torch.int64).to(DEVICE), found, N=64, EARLY=early)
    assert torch.equal(found.cpu(), (bits.int() & 0x7FFF).amax(1).int())


@pytest.mark.thinned
@by_bits
@by_dtype
@by_shape
@by_rows
@pytest.mark.parametrize("threads", [1, 3])
def test_on_the_threads_of_a_cpu(
    bits: int, dtype: torch.dtype, shape: tuple[int, int], rows: int, threads: int
) -> None:
    weight = rounded(bits, *shape)
    given, bias = inputs(rows, weight, dtype)
    assert compiled_kernels("quantised_numba", "linear") is not None
    with with_threads(threads), poisoned_memory():
        output = multiply(given, weight, bias)
    assert_close(output, exact(given, weight, bias), 2 * TOLERANCE[dtype])


@by_bits
def test_rows_of_any_number_of_dimensions(bits: int) -> None:
    weight = rounded(bits, 33, 100)
    given = normal(1, 2, 3, 100)
    assert_close(multiply(given, weight, None), exact(given, weight, None), 1e-6)
    assert multiply(given[:, :0], weight, None).shape == (2, 0, 33)
    strided = normal(1, 100, 4).T
    assert_close(multiply(strided, weight, None), exact(strided, weight, None), 1e-6)


shapes = st.tuples(st.integers(1, 40), st.integers(1, 200))
seeds = st.integers(0, 1000)


@given(seed=seeds, shape=shapes, scale=st.sampled_from([1e-6, 0.02, 300.0]))
def test_int8_is_within_half_a_step_of_its_output_channel(seed: int, shape: tuple[int, int], scale: float) -> None:
    weights = scale * normal(seed, *shape)
    errors = (round_to_int8(weights).restored(torch.float64) - weights.double()).abs()
    assert bool((errors <= 0.5001 * weights.double().abs().amax(1, keepdim=True) / 127).all())


@given(seed=seeds, shape=shapes, scale=st.sampled_from([1e-6, 0.02, 300.0]))
def test_int4_is_within_a_step_of_its_group(seed: int, shape: tuple[int, int], scale: float) -> None:
    """Within half a step where the weight is not beyond 7.5 steps; scales have 8 bits of their own."""
    weights = scale * normal(seed, *shape)
    errors = (round_to_int4(weights).restored(torch.float64) - weights.double()).abs()
    for first in range(0, shape[1], GROUP):
        some = slice(first, first + GROUP)
        group, off = weights[:, some].double(), errors[:, some]
        step = group.abs().amax(1, keepdim=True) / 8
        assert bool((off <= 1.05 * step).all())
        assert bool((off <= 0.54 * step)[group.abs() <= 7.4 * step].all())


def test_rounding_of_normal_weights_loses_what_its_bits_allow() -> None:
    weights = normal(0, 256, 4096)
    assert relative_error(round_to_int8(weights).restored(torch.float64), weights) < 0.0095
    assert relative_error(round_to_int4(weights).restored(torch.float64), weights) < 0.09


@by_bits
def test_zeros_stay_zeros(bits: int) -> None:
    weights = torch.zeros(3, 70)
    weights[1, 5] = 1.0
    weight = round_to_int8(weights) if bits == 8 else round_to_int4(weights)
    assert torch.equal(weight.restored(torch.float32), weights)


@by_bits
def test_rounding_by_blocks_is_rounding_at_once(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = rounded(bits, 33, 100)
    monkeypatch.setattr(quantised, "BLOCK", 700)
    parts = rounded(bits, 33, 100)
    assert torch.equal(parts.numbers, weight.numbers)
    assert torch.equal(parts.scales, weight.scales)


def test_without_numba_products_are_torchs() -> None:
    run_together(check_product, [()], 100)
