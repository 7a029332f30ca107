"""Runs of rows against plain Python lists."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.kernels.common.row_operations import expand_full_runs, expand_runs, fill_budget

Run = tuple[int, int]


@st.composite
def rows_of_runs(draw: st.DrawFn) -> list[list[Run]]:
    """Several rows with the same number of runs (start, length), some of length 0."""
    runs = draw(st.integers(1, 8))
    run = st.tuples(st.integers(0, 1000), st.integers(0, 6))
    return draw(st.lists(st.lists(run, min_size=runs, max_size=runs), min_size=1, max_size=4))


def tensors(rows: list[list[Run]], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    starts, lengths = torch.tensor(rows, dtype=dtype).unbind(-1)
    return starts, lengths


def python_rows(runs: list[Run]) -> list[int]:
    return list(chain.from_iterable(range(start, start + length) for start, length in runs))


integer_types = st.sampled_from([torch.int32, torch.int64])


@given(rows_of_runs(), st.integers(0, 60), integer_types)
def test_budget_takes_whole_runs_in_order_and_the_start_of_the_next(
    rows: list[list[Run]], budget: int, dtype: torch.dtype
) -> None:
    _, lengths = tensors(rows, dtype)
    kept = fill_budget(lengths, budget)
    assert kept.shape == lengths.shape
    assert (kept >= 0).all()
    for row, runs in enumerate(rows):
        cut = [(start, int(length)) for (start, _), length in zip(runs, kept[row], strict=True)]
        assert python_rows(cut) == python_rows(runs)[:budget]


@given(rows_of_runs(), st.integers(0, 60), integer_types)
def test_expanded_rows_come_in_order_up_to_the_capacity(
    rows: list[list[Run]], capacity: int, dtype: torch.dtype
) -> None:
    found, valid = expand_runs(*tensors(rows, dtype), capacity)
    assert found.shape == valid.shape == (len(rows), capacity)
    assert found.dtype == torch.int64
    for row, runs in enumerate(rows):
        expected = python_rows(runs)[:capacity]
        assert found[row, valid[row]].tolist() == expected
        assert valid[row].tolist() == [slot < len(expected) for slot in range(capacity)]


@given(rows_of_runs(), st.integers(0, 60))
def test_unused_slots_name_a_row_that_exists(rows: list[list[Run]], capacity: int) -> None:
    found, valid = expand_runs(*tensors(rows, torch.int64), capacity)
    assert not found[~valid].any()


@given(rows_of_runs(), st.integers(0, 60))
def test_leading_dimensions_are_independent(rows: list[list[Run]], capacity: int) -> None:
    starts, lengths = tensors(rows, torch.int64)
    together = expand_runs(starts[:, None], lengths[:, None], capacity)[0]
    apart = [expand_runs(start, length, capacity)[0] for start, length in zip(starts, lengths, strict=True)]
    assert torch.equal(together[:, 0], torch.stack(apart))


@given(rows_of_runs(), st.integers(0, 30))
def test_runs_that_leave_no_slot_unused_expand_alike(rows: list[list[Run]], capacity: int) -> None:
    total = [sum(length for _, length in runs) for runs in rows]
    # One more run in each row fills it up to the same total.
    capacity = max([capacity, *total])
    filled = [[*runs, (7, capacity - short)] for runs, short in zip(rows, total, strict=True)]
    starts, lengths = tensors(filled, torch.int64)
    found = expand_full_runs(starts[:, None], lengths[:, None], capacity)
    assert found.shape == (len(rows), 1, capacity)
    assert found[:, 0].tolist() == [python_rows(runs) for runs in filled]


def test_runs_that_do_leave_slots_unused_are_refused() -> None:
    with pytest.raises(RuntimeError):
        expand_full_runs(torch.tensor([[3, 9]]), torch.tensor([[2, 2]]), 5)
