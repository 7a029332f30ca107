"""Rows that grow in place."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal

from sparsekv.runtime.cache.buffers import LEAST_ROOM, GrowingRows


@settings(max_examples=30)
@given(
    first=st.integers(0, 20),
    writes=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 2 * LEAST_ROOM)), max_size=6),
)
def test_growing_rows_hold_what_was_written_last(first: int, writes: list[tuple[int, int]]) -> None:
    expected = first_rows = normal(0, 2, first, 1)
    rows = GrowingRows(first_rows)
    for number, (start, length) in enumerate(writes, 1):
        start, written = min(start, expected.shape[1]), normal(number, 2, length, 1)
        rows.write(start, written)
        expected = torch.cat([expected[:, :start], written], 1)
        assert torch.equal(rows.rows, expected)
    assert torch.equal(first_rows, normal(0, 2, first, 1))
