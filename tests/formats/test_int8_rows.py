"""Keys and values in 8 bits: off by at most half a scale, whatever their shape and size, and restored in any pieces."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal

from sparsekv.formats.context_rows import ContextRows, context_rows
from sparsekv.formats.int8_rows import KEY_BLOCK, PIECE, first_tokens, joined, quantise, restore, row_bytes

TINY = 1e-34  # below it scales have fewer bits, or none
shapes = st.tuples(st.integers(1, 3), st.integers(1, 3 * KEY_BLOCK + 1), st.integers(1, 9))
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def _rows(seed: int, shape: tuple[int, int, int], exponent: float, outliers: float, dtype: torch.dtype) -> torch.Tensor:
    """Normal rows about a mean of each channel's own, some times as large, in the range of a dtype."""
    rows = normal(seed, *shape) + 3 * normal(seed + 1, shape[0], 1, shape[2])
    rows = torch.where(normal(seed + 2, *shape) > 2, rows * outliers, rows)
    largest = torch.finfo(dtype).max
    return (rows.double() * 10.0**exponent).clamp(-largest, largest).to(dtype)


def _bound(tensors: dict[str, torch.Tensor], rows: torch.Tensor, part: str) -> torch.Tensor:
    """The most that restored rows may be off: half a scale, and the rounding of the result to its dtype, whose smallest
    numbers lie further apart than their own size tells."""
    dtype = torch.finfo(rows.dtype)
    of_smallest = dtype.eps * dtype.smallest_normal / 2
    scales = tensors[f"{part}_scales"].double()
    scales = scales.repeat_interleave(KEY_BLOCK, 1)[:, : rows.shape[1]] if part == "key" else scales[..., None]
    return 0.501 * scales + dtype.eps * rows.double().abs() + of_smallest + TINY


@given(st.integers(0, 99), shapes, st.floats(-30, 38), st.sampled_from([1.0, 1e3, 1e6]), dtypes)
@settings(max_examples=150, deadline=None)
def test_restored_rows_are_off_by_at_most_half_a_scale(
    seed: int, shape: tuple[int, int, int], exponent: float, outliers: float, dtype: torch.dtype
) -> None:
    keys, values = (_rows(seed + 10 * part, shape, exponent, outliers, dtype) for part in (0, 1))
    tensors = quantise(keys, values)
    restored = context_rows(tensors, dtype).part(slice(None))
    for part, rows, found in zip(("key", "value"), (keys, values), restored, strict=True):
        assert found.dtype == dtype
        assert found.isfinite().all()
        assert ((found.double() - rows.double()).abs() <= _bound(tensors, rows, part)).all()


def test_what_is_stored_has_the_documented_shapes_and_dtypes() -> None:
    tensors = quantise(normal(0, 2, KEY_BLOCK + 1, 8), normal(1, 2, KEY_BLOCK + 1, 8))
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == {
        "keys": (torch.int8, (2, KEY_BLOCK + 1, 8)),
        "values": (torch.int8, (2, KEY_BLOCK + 1, 8)),
        "key_scales": (torch.bfloat16, (2, 2, 8)),
        "key_offsets": (torch.bfloat16, (2, 2, 8)),
        "value_scales": (torch.bfloat16, (2, KEY_BLOCK + 1)),
    }
    assert tensors["keys"].min() >= -127


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


def test_an_outlier_costs_its_own_channel_of_keys_and_its_own_token_of_values_alone() -> None:
    rows = normal(0, 1, KEY_BLOCK, 8)
    spiked = rows.clone()
    spiked[0, 5, 3] = 1e4
    exact = context_rows(quantise(rows, rows), torch.float32).part(slice(None))
    keys, values = context_rows(quantise(spiked, spiked), torch.float32).part(slice(None))
    others, tokens = torch.arange(8) != 3, torch.arange(KEY_BLOCK) != 5
    assert torch.equal(keys[..., others], exact[0][..., others])
    assert torch.equal(values[:, tokens], exact[1][:, tokens])


def test_offsets_keep_a_channel_that_lies_far_from_zero_as_exact_as_the_others() -> None:
    rows = normal(0, 1, KEY_BLOCK, 1)
    at_zero, far = (quantise(rows + mean, rows)["key_scales"].float() for mean in (0.0, 64.0))
    assert torch.allclose(at_zero, far, rtol=0.1)


def test_scales_that_are_finite_never_give_a_number_that_is_not() -> None:
    numbers = torch.tensor([[[-127, 0, 127]]], dtype=torch.int8)
    scales = torch.full((1, 1, 3), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    assert restore(numbers, scales, scales, torch.float16).isfinite().all()


@pytest.fixture(scope="module")
def long_rows() -> ContextRows:
    """More tokens than are converted at a time, and a last block that is not full."""
    return context_rows(quantise(normal(0, 2, PIECE + 70, 4), normal(1, 2, PIECE + 70, 4)), torch.bfloat16)


@given(st.integers(0, PIECE + 70), st.integers(0, PIECE + 70))
@settings(max_examples=40, deadline=None)
def test_a_part_is_the_same_part_of_the_whole(long_rows: ContextRows, first: int, stop: int) -> None:
    whole, part = long_rows.part(slice(None)), long_rows.part(slice(first, stop))
    for all_rows, rows in zip(whole, part, strict=True):
        assert torch.equal(rows, all_rows[:, first:stop])


@given(st.integers(0, 9), st.integers(0, 40), st.integers(0, 200))
@settings(max_examples=40, deadline=None)
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


@pytest.mark.parametrize("tokens", [KEY_BLOCK, 3 * KEY_BLOCK])
def test_blocks_that_are_taken_over_and_new_ones_are_those_of_one_pass(tokens: int) -> None:
    keys, values = normal(0, 2, 200, 4), normal(1, 2, 200, 4)
    whole = quantise(keys, values)
    continued = joined(first_tokens(whole, tokens), quantise(keys[:, tokens:], values[:, tokens:]))
    assert all(torch.equal(continued[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("channels", [16, 64, 128, 256])
def test_a_build_asks_for_as_much_room_as_rows_take(channels: int) -> None:
    tensors = quantise(normal(0, 1, 256, channels), normal(1, 1, 256, channels))
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert stored <= 256 * 2 * row_bytes(channels) <= 1.1 * stored
