"""PQCache's codes as they are stored: as good as faiss's own product quantiser's, and grown by the same codebooks."""

from dataclasses import replace

import faiss
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import clustered, normal
from support.small_index import small_plan
from support.small_tables import layer_input

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.indexers.interface import LayerInput, choose_indexers, indexers
from sparsekv.indexing.methods.pqcache import PQCacheIndexer

properties = settings(max_examples=10)


def _given(keys: torch.Tensor) -> LayerInput:
    return replace(layer_input(), keys=keys, values=keys)


def _decoded(built: dict[str, torch.Tensor]) -> torch.Tensor:
    """[Hk, M, D] float64: the keys that codes [Hk, M, m] and codebooks [Hk, m, C, D / m] stand for."""
    codes, books = built["codes"].long(), built["codebooks"].double()
    parts = [book.gather(1, code[..., None].expand(-1, -1, book.shape[-1])) for code, book in _by_part(codes, books)]
    return torch.cat(parts, -1)


def _by_part(codes: torch.Tensor, books: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(codes[..., part], books[:, part]) for part in range(codes.shape[-1])]


def _assert_nearest(codes: torch.Tensor, books: torch.Tensor, keys: torch.Tensor) -> None:
    parts = keys.double().unflatten(-1, (codes.shape[-1], -1))
    for part, (of_part, book) in enumerate(_by_part(codes.long(), books.double())):
        # Squares, as they are compared in float32: near 0 a distance itself is much less exact.
        squares = torch.cdist(parts[:, :, part], book).square()
        assert bool((squares.gather(-1, of_part[..., None])[..., 0] <= squares.amin(-1) + 1e-4).all())


@properties
@given(seed=st.integers(0, 10**6), middle=st.integers(1, 300), pq_bytes=st.sampled_from([1, 2, 8, 16]))
def test_a_code_names_the_nearest_stored_centroid_of_each_part(seed: int, middle: int, pq_bytes: int) -> None:
    keys = normal(seed, 2, middle, 16)
    built = PQCacheIndexer(pq_bytes=pq_bytes, iterations=3).build_layer(_given(keys))
    assert built["codes"].shape == (2, middle, pq_bytes)
    assert built["codes"].dtype == torch.uint8
    assert built["codebooks"].shape == (2, pq_bytes, min(256, middle), 16 // pq_bytes)
    assert built["codebooks"].dtype == torch.float16
    _assert_nearest(built["codes"], built["codebooks"], keys)


def test_keys_are_told_apart_as_well_as_by_faiss_own_quantiser() -> None:
    # Overlapping groups: with separate ones a single unlucky seed decides which looks better.
    keys = 0.3 * clustered(0, 2, 2000, 16, 60) + normal(1, 2, 2000, 16)
    built = PQCacheIndexer(pq_bytes=4).build_layer(_given(keys))
    ours = float((_decoded(built) - keys).square().sum())
    theirs = 0.0
    for head in keys:
        index = faiss.IndexPQ(16, 4, 8)
        index.pq.cp.niter, index.pq.cp.min_points_per_centroid = 10, 1
        index.train(head.numpy())
        index.add(head.numpy())
        theirs += float((torch.from_numpy(index.reconstruct_n(0, len(head))) - head).square().sum())
    assert 0.95 < ours / theirs < 1.05
    assert ours < 0.2 * float((keys - keys.mean(1, keepdim=True)).square().sum())


@pytest.mark.parametrize("middle", [1, 40, 256])
def test_keys_as_many_as_codes_are_kept_as_they_are(middle: int) -> None:
    keys = normal(2, 2, middle, 16).half().float()
    assert torch.equal(_decoded(PQCacheIndexer().build_layer(_given(keys))), keys.double())


@properties
@given(seed=st.integers(0, 10**6), more=st.integers(0, 50))
def test_new_keys_are_encoded_in_the_old_codebooks(seed: int, more: int) -> None:
    indexer, keys = PQCacheIndexer(pq_bytes=4, iterations=3), normal(seed, 2, 300 + more, 16)
    built = indexer.build_layer(_given(keys[:, :300]))
    grown = indexer.append_layer(built, _given(keys), 300)
    assert grown.keys() == built.keys()
    assert torch.equal(grown["codebooks"], built["codebooks"])
    assert torch.equal(grown["codes"][:, :300], built["codes"])
    assert grown["codes"].shape == (2, 300 + more, 4)
    _assert_nearest(grown["codes"][:, 300:], built["codebooks"], keys[:, 300:])


def test_codebooks_of_a_few_keys_are_made_again() -> None:
    indexer, keys = PQCacheIndexer(pq_bytes=4, iterations=3), normal(7, 2, 90, 16)
    grown = indexer.append_layer(indexer.build_layer(_given(keys[:, :40])), _given(keys), 40)
    assert torch.equal(grown["codebooks"], indexer.build_layer(_given(keys))["codebooks"])


def test_the_same_seed_gives_the_same_codes_and_another_seed_others() -> None:
    given = _given(normal(3, 2, 400, 16))
    first, again, other = (PQCacheIndexer(seed=seed).build_layer(given)["codes"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_few_points_for_many_centroids_are_no_cause_for_advice(capfd: pytest.CaptureFixture[str]) -> None:
    PQCacheIndexer().build_layer(_given(normal(4, 2, 300, 16)))
    assert capfd.readouterr() == ("", "")


def test_it_is_built_when_it_is_asked_for() -> None:
    assert "pqcache" in indexers()
    assert "pqcache" not in choose_indexers([])
    assert choose_indexers(["pqcache"]) == ["pqcache"]


def test_codes_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="--pq-bytes 0: give at least 1"):
        PQCacheIndexer(pq_bytes=0)
    with pytest.raises(UsageError, match="--iterations 0: give a number from 1 to 10000"):
        PQCacheIndexer(iterations=0)
    with pytest.raises(UsageError, match="--pq-bytes 5: the model's heads have 16 channels; give a divisor"):
        small_plan(methods={"pqcache": PQCacheIndexer(pq_bytes=5)})
