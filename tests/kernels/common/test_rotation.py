"""Rotating rows by their positions: against complex numbers, undone again, and its effect on dot products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.reference import assert_close
from support.rotation import rotated

from sparsekv.formats.index.schema import RopeFacts
from sparsekv.kernels.common.row_operations import rotate

properties = settings(max_examples=40)
ropes = st.builds(RopeFacts, frequencies=st.lists(st.floats(0, 1, width=32), max_size=4), interleaved=st.booleans())
sizes = st.integers(8, 12)
seeds = st.integers(0, 10**6)
FAR = 500  # radians, which float32 represents to 3e-5


def _rotate(rows: torch.Tensor, positions: torch.Tensor, rope: RopeFacts) -> torch.Tensor:
    return rotate(rows, positions, torch.tensor(rope.frequencies), rope.interleaved)


@properties
@given(rope=ropes, size=sizes, seed=seeds, first=st.integers(-FAR, FAR))
def test_pairs_turn_as_complex_numbers_and_other_channels_stay(
    rope: RopeFacts, size: int, seed: int, first: int
) -> None:
    rows, positions = normal(seed, 2, 5, size), first + torch.arange(5)
    result = _rotate(rows, positions, rope)
    assert result.dtype == torch.float32
    assert_close(result, rotated(rows, positions, rope), 1e-4)
    assert torch.equal(result[..., 2 * len(rope.frequencies) :], rows[..., 2 * len(rope.frequencies) :])


@properties
@given(rope=ropes, size=sizes, seed=seeds, first=st.integers(0, 10**6))
def test_negative_positions_undo_positive_ones_however_far(rope: RopeFacts, size: int, seed: int, first: int) -> None:
    rows, positions = normal(seed, 3, 4, size), first + torch.arange(4)
    assert_close(_rotate(_rotate(rows, positions, rope), -positions, rope), rows, 1e-6)


@properties
@given(rope=ropes, size=sizes, seed=seeds, distance=st.integers(0, FAR), key=st.integers(0, FAR))
def test_products_see_distances_alone(rope: RopeFacts, size: int, seed: int, distance: int, key: int) -> None:
    query, keys = normal(seed, 1, size), normal(seed + 1, 1, size)
    at = torch.tensor([key])
    far = _rotate(query, at + distance, rope) @ _rotate(keys, at, rope).T
    here = _rotate(query, torch.tensor([distance]), rope) @ keys.T
    assert float((far - here).abs()) <= 1e-3 * float(query.norm() * keys.norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_rows_are_turned_in_float32(dtype: torch.dtype) -> None:
    rope = RopeFacts(frequencies=[0.5, 0.01], interleaved=True)
    rows, positions = normal(0, 2, 6, 8).to(dtype), torch.arange(6)
    assert_close(_rotate(rows, positions, rope), rotated(rows, positions, rope), 1e-6)


def test_positions_are_shared_by_heads_or_each_heads_own() -> None:
    rope = RopeFacts(frequencies=[0.5, 0.01], interleaved=False)
    rows, positions = normal(0, 2, 3, 6, 8), torch.randint(0, 99, (2, 1, 6))
    assert_close(_rotate(rows, positions, rope), rotated(rows, positions, rope), 1e-5)
    same = positions[0, 0]
    assert torch.equal(_rotate(rows, same, rope), _rotate(rows, same.expand(2, 3, -1), rope))
