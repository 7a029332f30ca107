"""Rows of the middle in memory and on disk: the same rows, whatever was taken in, put in order and forgotten."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.small_index import build_small

from sparsekv.formats.index.reader import Artifact
from sparsekv.runtime.cache.kv_store import DiskRows, MappedRows, MemoryRows, MiddleRows, lay_out

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[None, "int8"], ids=["exact", "int8"])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_small(tmp_path_factory.mktemp("rows") / "small.skv", tokens=150, kv_dtype=request.param).artifact


def _shuffled(seed: int, heads: int, rows: int) -> torch.Tensor:
    return torch.rand(heads, rows, generator=torch.Generator().manual_seed(seed)).argsort(1)


def _stored(artifact: Artifact) -> tuple[torch.Tensor, torch.Tensor]:
    split, (keys, values) = artifact.manifest.split, artifact.context(1)
    middle = slice(split.sinks, split.sinks + split.middle)
    return keys[:, middle], values[:, middle]


def _both(artifact: Artifact, order: torch.Tensor | None) -> list[MiddleRows]:
    split, disk = artifact.manifest.split, DiskRows(artifact, 1, order, CPU, torch.float32)
    middle = slice(split.sinks, split.sinks + split.middle)
    mapped = MappedRows(artifact.context_rows(1), middle, order, torch.float32)
    return [MemoryRows(*_stored(artifact), order, CPU), disk, mapped]


def _agree(places: list[MiddleRows], expected: tuple[torch.Tensor, torch.Tensor], seed: int) -> None:
    Hk, used, D = expected[0].shape
    rows = torch.randint(used, (Hk, 9), generator=torch.Generator().manual_seed(seed))
    ordered = _in_order(expected)
    for place in places:
        assert place.used == used
        for got, all_rows in zip(place.gather(rows), expected, strict=True):
            assert torch.equal(got, all_rows.gather(1, rows[..., None].expand(-1, -1, D)))
        assert torch.equal(_in_order(place.in_any_order()), ordered)
        for got, all_rows in zip(place.from_row(used // 2), expected, strict=True):
            assert torch.equal(got, all_rows[:, used // 2 :])


def _in_order(rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """[Hk, N, 2 D]: keys beside their values, ordered by a random projection, which only equal rows share."""
    both = torch.cat(rows, 2)
    order = (both.double() @ normal(0, both.shape[2]).double()).argsort(1)
    return both.gather(1, order[..., None].expand_as(both))


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0, 1)), max_size=4), st.integers(0, 99))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_in_any_layout_grow_and_come_back(artifact: Artifact, steps: list[tuple[int, float]], seed: int) -> None:
    stored = _stored(artifact)
    Hk, M, D = stored[0].shape
    numbers = _shuffled(seed, Hk, M)
    places = _both(artifact, numbers)
    everything = stored
    for number, (tokens, share) in enumerate(steps):
        start, used = int(share * numbers.shape[1]), numbers.shape[1]
        new = normal(seed + number, Hk, tokens, D), normal(seed + number + 50, Hk, tokens, D)
        order = _shuffled(seed + number, Hk, used - start + tokens)
        among = torch.cat([numbers[:, start:], torch.arange(used, used + tokens).expand(Hk, -1)], 1)
        numbers = torch.cat([numbers[:, :start], among.gather(1, order)], 1)
        everything = torch.cat([everything[0], new[0]], 1), torch.cat([everything[1], new[1]], 1)
        for place in places:
            place.rewrite(start, new, order)
        _agree(places, (lay_out(everything[0], numbers), lay_out(everything[1], numbers)), seed)
    back = numbers.argsort(1)[:, :M]
    for place in places:
        place.rewrite(0, None, back)
    _agree(places, stored, seed)


@given(st.lists(st.integers(1, 30), max_size=4), st.integers(0, 99))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_in_order_of_position_are_added_to(artifact: Artifact, steps: list[int], seed: int) -> None:
    stored = everything = _stored(artifact)
    Hk, M, D = stored[0].shape
    places = _both(artifact, None)
    for number, tokens in enumerate(steps):
        new = normal(seed + number, Hk, tokens, D), normal(seed + number + 50, Hk, tokens, D)
        everything = torch.cat([everything[0], new[0]], 1), torch.cat([everything[1], new[1]], 1)
        for place in places:
            place.rewrite(place.used, new, torch.arange(tokens).expand(Hk, -1))
        _agree(places, everything, seed)
    for place in places:
        place.rewrite(M, None, torch.empty(Hk, 0, dtype=torch.int64))
    _agree(places, stored, seed)


def test_rows_in_any_order_are_not_laid_out(artifact: Artifact) -> None:
    """So that a question that reads everything leaves nothing in memory."""
    Hk, M, _ = _stored(artifact)[0].shape
    split, order = artifact.manifest.split, _shuffled(1, Hk, M)
    rows = MappedRows(artifact.context_rows(1), slice(split.sinks, split.sinks + M), order, torch.float32)
    assert all(torch.equal(*pair) for pair in zip(rows.in_any_order(), _stored(artifact), strict=True))
    assert rows._laid_out is None


def test_rows_in_order_of_position_are_read_where_the_file_is_mapped(artifact: Artifact) -> None:
    """Until a row is added; int8 rows are dequantised into a copy."""
    exact, split = artifact.manifest.kv_storage is None, artifact.manifest.split
    stored, middle = artifact.context_rows(1), slice(split.sinks, split.sinks + split.middle)
    rows = MappedRows(stored, middle, None, torch.float32)
    placed = rows.in_place()
    assert placed is not None
    assert (placed.keys.untyped_storage().data_ptr() == stored.tensors["keys"].untyped_storage().data_ptr()) == exact
    assert all(torch.equal(*pair) for pair in zip((placed.keys, placed.values), _stored(artifact), strict=True))
    new = normal(3, len(placed.keys), 1, placed.keys.shape[2])
    rows.rewrite(split.middle, (new, new), torch.zeros(len(new), 1, dtype=torch.int64))
    grown = rows.in_place()
    assert grown is not None
    assert torch.equal(grown.keys[:, : rows.used], torch.cat([_stored(artifact)[0], new], 1))
