"""Keys and values in 8 bits: off by at most half a scale, whatever their shape and size, restored in any pieces, and
continued at any token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal

from sparsekv.formats.index.context_rows import (
    PIECE,
    ContextRows,
    context_rows,
    first_tokens,
    joined,
    quantise,
    restore,
    row_bytes,
)

TINY = 1e-34  # below it scales have fewer bits, or none
shapes = st.tuples(st.integers(1, 3), st.integers(1, 193), st.integers(1, 9))
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def _rows(seed: int, shape: tuple[int, int, int], exponent: float, outliers: float, dtype: torch.dtype) -> torch.Tensor:
    """Normal rows about a mean of each channel's own, some times as large, in the range of a dtype."""
    rows = normal(seed, *shape) + 3 * normal(seed + 1, shape[0], 1, shape[2])
    rows = torch.where(normal(seed + 2, *shape) > 2, rows * outliers, rows)
    largest = torch.finfo(dtype).max
    return (rows.double() * 10.0**exponent).clamp(-largest, largest).to(dtype)


def _steps(tensors: dict[str, torch.Tensor], part: str) -> torch.Tensor:
    """[Hk, N, D or 1] float64: what one more makes of each number."""
    steps = tensors[f"{part}_scales"].double()[..., None]
    return steps * tensors["channel_scales"].double()[:, None] if part == "key" else steps


def _bound(tensors: dict[str, torch.Tensor], found: torch.Tensor, part: str) -> torch.Tensor:
    """The most that restored rows may be off: half a scale, and the rounding of the result to its dtype, whose smallest
    numbers lie further apart than their own size tells."""
    dtype = torch.finfo(found.dtype)
    of_smallest = dtype.eps * dtype.smallest_normal / 2
    return 0.501 * _steps(tensors, part) + dtype.eps / 2 * found.double().abs() + of_smallest + TINY


@given(st.integers(0, 99), shapes, st.floats(-30, 38), st.sampled_from([1.0, 1e3, 1e6]), dtypes)
@settings(max_examples=40)
def test_restored_rows_are_off_by_at_most_half_a_scale(
    seed: int, shape: tuple[int, int, int], exponent: float, outliers: float, dtype: torch.dtype
) -> None:
    keys, values = (_rows(seed + 10 * part, shape, exponent, outliers, dtype) for part in (0, 1))
    tensors = quantise(keys, values)
    restored = context_rows(tensors, dtype).part(slice(None))
    for part, rows, found in zip(("key", "value"), (keys, values), restored, strict=True):
        assert found.dtype == dtype
        assert found.isfinite().all()
        assert ((found.double() - rows.double()).abs() <= _bound(tensors, found, part)).all()


def test_what_is_stored_has_the_documented_shapes_and_dtypes() -> None:
    tensors = quantise(normal(0, 2, 65, 8), normal(1, 2, 65, 8))
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == {
        "keys": (torch.int8, (2, 65, 8)),
        "values": (torch.int8, (2, 65, 8)),
        "key_scales": (torch.bfloat16, (2, 65)),
        "value_scales": (torch.bfloat16, (2, 65)),
        "channel_scales": (torch.bfloat16, (2, 8)),
        "channel_offsets": (torch.bfloat16, (2, 8)),
    }
    assert tensors["keys"].min() >= -127
    assert tensors["keys"].abs().amax(2).eq(127).all()  # no token's range is left unused


def test_zeros_come_back_as_zeros() -> None:
    nothing = torch.zeros(2, 70, 4)
    for rows in context_rows(quantise(nothing, nothing), torch.float32).part(slice(None)):
        assert torch.equal(rows, nothing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_constant_channel_however_large_comes_back(dtype: torch.dtype) -> None:
    """Its offset rounds up beyond float16's largest number; what is restored does not."""
    rows = torch.full((1, 65, 3), torch.finfo(dtype).max, dtype=dtype)
    keys, values = context_rows(quantise(rows, -rows), dtype).part(slice(None))
    for found, expected in ((keys, rows), (values, -rows)):
        assert ((found.double() - expected.double()).abs() <= rows.double() / 250).all()


def test_a_channel_of_zeros_stays_one_beside_others() -> None:
    rows = normal(0, 2, 70, 4)
    rows[..., 2] = 0
    keys, _ = context_rows(quantise(rows, rows), torch.float32).part(slice(None))
    assert not keys[..., 2].any()
    assert keys[..., :2].any(2).all()


def test_a_token_that_leaves_a_constant_channel_is_still_off_by_at_most_half_a_scale() -> None:
    rows = normal(0, 2, 70, 4)
    rows[..., 2] = 0
    tensors = quantise(rows, rows)
    later = quantise(normal(1, 2, 9, 4), normal(1, 2, 9, 4), like=tensors)
    keys, _ = context_rows(later, torch.float32).part(slice(None))
    assert ((keys - normal(1, 2, 9, 4)).double().abs() <= _bound(later, keys, "key")).all()
    assert _steps(later, "key").max() < 0.2


def test_an_outlier_costs_its_own_token_alone_where_channels_are_given() -> None:
    """The bytes of all other tokens' keys and values stay."""
    rows = normal(0, 1, 64, 8)
    spiked = rows.clone()
    spiked[0, 5, 3] = 1e4
    exact = quantise(rows, rows)
    found = quantise(spiked, spiked, like=exact)
    others = torch.arange(64) != 5
    for name in ("keys", "values", "key_scales", "value_scales"):
        assert torch.equal(found[name][:, others], exact[name][:, others])
    keys, _ = context_rows(found, torch.float32).part(slice(None))
    assert ((keys - spiked).double().abs() <= _bound(found, keys, "key")).all()


@pytest.mark.parametrize("factor", [10.0, 1e3, 1e6])
def test_a_channel_of_large_keys_costs_the_others_less_than_its_size(factor: float) -> None:
    """The channel's scale takes three quarters of the size, in powers: what is left for a token's scale is a fourth."""
    rows = normal(0, 1, 64, 8)
    large = rows.clone()
    large[..., 3] *= factor
    others = torch.arange(8) != 3
    plain, beside = (_steps(quantise(of, rows), "key")[..., others].mean() for of in (rows, large))
    assert beside < 1.5 * factor**0.25 * plain


def test_offsets_keep_a_channel_that_lies_far_from_zero_as_exact_as_the_others() -> None:
    rows = normal(0, 1, 64, 3)
    far = rows + torch.tensor([0.0, 64.0, -64.0])
    # On average: the offset's own rounding moves a number by up to 0.25, and with it a token's scale.
    steps, steps_far = (_steps(quantise(of, rows), "key").mean(1) for of in (rows, far))
    assert torch.allclose(steps, steps_far, rtol=0.1)


def test_scales_that_are_finite_never_give_a_number_that_is_not() -> None:
    numbers = torch.tensor([[[-127, 0, 127]]], dtype=torch.int8)
    largest = torch.finfo(torch.bfloat16).max
    for size in (largest, -largest, 1.0, 0.0):
        for offset in (largest, -largest, 0.0):
            scales, offsets = (torch.full((1, 3), of, dtype=torch.bfloat16) for of in (size, offset))
            for channels in (None, (scales, offsets)):
                for of_token in (largest, -largest, size):
                    tokens = torch.full((1, 1), of_token, dtype=torch.bfloat16)
                    assert restore(numbers, tokens, channels, torch.float16).isfinite().all()


@given(st.integers(0, 99), st.floats(-38, 38), st.floats(-38, 38), dtypes)
@settings(max_examples=40)
def test_rows_of_any_size_continue_rows_of_any_other(
    seed: int, exponent: float, then: float, dtype: torch.dtype
) -> None:
    """However far outside the range of the channels: no number that is not finite is stored or restored."""
    first, later = (_rows(seed, (2, 20, 5), size, 1.0, dtype) for size in (exponent, then))
    tensors = quantise(later, later, like=quantise(first, first))
    for name in ("key_scales", "value_scales", "channel_scales", "channel_offsets"):
        assert tensors[name].isfinite().all()
    keys, values = context_rows(tensors, dtype).part(slice(None))
    assert keys.isfinite().all()
    assert values.isfinite().all()


@pytest.fixture(scope="module")
def long_rows() -> ContextRows:
    """More tokens than are converted at a time."""
    return context_rows(quantise(normal(0, 2, PIECE + 70, 4), normal(1, 2, PIECE + 70, 4)), torch.bfloat16)


@given(st.integers(0, PIECE + 70), st.integers(0, PIECE + 70))
@settings(max_examples=40)
def test_a_part_is_the_same_part_of_the_whole(long_rows: ContextRows, first: int, stop: int) -> None:
    whole, part = long_rows.part(slice(None)), long_rows.part(slice(first, stop))
    for all_rows, rows in zip(whole, part, strict=True):
        assert torch.equal(rows, all_rows[:, first:stop])


@given(st.integers(0, 9), st.integers(0, 40), st.integers(0, 200))
@settings(max_examples=40)
def test_gathered_rows_are_those_of_the_whole(long_rows: ContextRows, seed: int, count: int, first: int) -> None:
    tokens = torch.randint(PIECE + 70 - first, (2, count), generator=torch.Generator().manual_seed(seed))
    places = (tokens + first)[..., None].expand(-1, -1, 4)
    for all_rows, rows in zip(long_rows.part(slice(None)), long_rows.gather(tokens, first), strict=True):
        assert torch.equal(rows, all_rows.gather(1, places))


def test_exact_rows_are_views_and_gathered_the_same_way() -> None:
    keys, values = normal(0, 2, 30, 4), normal(1, 2, 30, 4)
    rows = context_rows({"keys": keys, "values": values}, torch.float32)
    assert rows.part(slice(3, 9))[0].data_ptr() == keys[:, 3:].data_ptr()
    tokens = torch.tensor([[1, 1, 20], [4, 0, 2]])
    for found, stored in zip(rows.gather(tokens, 5), (keys, values), strict=True):
        assert torch.equal(found, stored.gather(1, (tokens + 5)[..., None].expand(-1, -1, 4)))


@given(st.integers(0, 99), st.integers(0, 200), st.floats(-30, 30), dtypes)
@settings(max_examples=40)
def test_tokens_that_are_taken_over_and_new_ones_are_those_of_one_pass(
    seed: int, tokens: int, exponent: float, dtype: torch.dtype
) -> None:
    keys, values = (_rows(seed + part, (2, 200, 4), exponent, 1e3, dtype) for part in (0, 10))
    whole = quantise(keys, values)
    first = first_tokens(whole, tokens)
    continued = joined(first, quantise(keys[:, tokens:], values[:, tokens:], like=first))
    assert continued.keys() == whole.keys()
    assert all(torch.equal(continued[name], tensor) for name, tensor in whole.items())


@given(st.integers(0, 99), st.integers(1, 200), st.floats(-3, 3))
@settings(max_examples=40)
def test_tokens_that_follow_leave_what_is_stored_and_are_off_by_at_most_half_a_scale(
    seed: int, tokens: int, exponent: float
) -> None:
    """Whatever their size: only their own scales grow."""
    old = quantise(*(_rows(seed + part, (2, 200, 4), 0, 1.0, torch.float32) for part in (0, 10)))
    keys, values = (_rows(seed + part, (2, 30, 4), exponent, 1.0, torch.float32) for part in (20, 30))
    first = first_tokens(old, tokens)
    tensors = joined(first, quantise(keys, values, like=first))
    for name in ("keys", "values", "key_scales", "value_scales"):
        assert torch.equal(tensors[name][:, :tokens], old[name][:, :tokens])
    for name in ("channel_scales", "channel_offsets"):
        assert torch.equal(tensors[name], old[name])
    restored = context_rows(tensors, torch.float32).part(slice(tokens, None))
    later = {name: rows if "channel" in name else rows[:, tokens:] for name, rows in tensors.items()}
    # A key is taken from its offset, and given back to it, in float32.
    rounding = torch.finfo(torch.float32).eps * tensors["channel_offsets"].double().abs()[:, None]
    for part, rows, found in zip(("key", "value"), (keys, values), restored, strict=True):
        assert ((found.double() - rows.double()).abs() <= _bound(later, found, part) + rounding).all()


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_tokens_are_stored_and_continued_as_well(tokens: int) -> None:
    nothing, rows = torch.zeros(2, 0, 4), normal(0, 2, tokens, 4)
    tensors = quantise(nothing, nothing)
    assert [rows.shape for rows in context_rows(tensors, torch.float32).part(slice(None))] == [(2, 0, 4)] * 2
    continued = joined(tensors, quantise(rows, rows, like=tensors))
    assert continued["keys"].shape == rows.shape
    assert continued["key_scales"].shape == rows.shape[:2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_pieces_do_not_show_in_what_is_stored(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = normal(0, 2, 100, 4).to(dtype), normal(1, 2, 100, 4).to(dtype)
    whole = quantise(keys, values)
    monkeypatch.setattr("sparsekv.formats.index.context_rows.PIECE", 7)
    in_pieces = quantise(keys, values)
    assert all(torch.equal(in_pieces[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("channels", [16, 64, 128, 256])
def test_a_build_asks_for_as_much_room_as_rows_take(channels: int) -> None:
    tensors = quantise(normal(0, 1, 256, channels), normal(1, 1, 256, channels))
    shared = sum(tensors[name].nbytes for name in ("channel_scales", "channel_offsets"))
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert stored - shared == 256 * 2 * row_bytes(channels)
    assert shared == 2 * 2 * channels  # a layer's, whatever its tokens: nothing beside its rows
