"""CSAttention's tables as they are stored: the paper's sizes, the best keys of each centroid, and grown lists."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.reference import assert_close
from support.small_layer import SINKS
from support.small_tables import HALVES, SMALL, layer_input

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import RopeFacts
from sparsekv.indexing.indexers.interface import BuiltLayer, LayerInput, choose_indexers, indexers
from sparsekv.indexing.methods.csattention import CSAttentionIndexer
from sparsekv.kernels.posting_lists.posting_lists import split_channels

properties = settings(max_examples=15)


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@properties
@given(
    middle=st.integers(1, 90),
    size=st.sampled_from([2, 4, 8, 16]),
    clusters=st.integers(1, 40),
    alpha=st.floats(0.01, 1),
)
def test_tables_take_the_bytes_of_the_papers_formula(middle: int, size: int, clusters: int, alpha: float) -> None:
    indexer = CSAttentionIndexer(subspace_size=size, centroids=clusters, alpha=alpha, iterations=2, query_sample=64)
    built = indexer.build_layer(layer_input(middle=middle))
    Hk, parts, listed = 2, 16 // size, max(1, round(alpha * middle))
    assert _bytes(built["table_tokens"], built["table_scores"]) == Hk * parts * clusters * listed * 6
    assert _bytes(built["centroids"]) == Hk * parts * clusters * size * 2
    if alpha * middle == listed:
        expected = _bytes(built["table_tokens"], built["table_scores"])
        # 0.7 of ten tokens is a whole number of them, 0.7 times other numbers is rounded.
        assert Hk * middle * indexer.bytes_per_token(16) == pytest.approx(expected, rel=1e-12)


def _assert_lists_are_the_best(built: dict[str, torch.Tensor], given: LayerInput) -> None:
    tokens, scores = built["table_tokens"].long() - SINKS, built["table_scores"]
    keys = split_channels(given.keys, built["channels"]).double()
    exact = built["centroids"].double() @ keys.transpose(-1, -2)
    assert torch.equal(tokens, exact.topk(tokens.shape[-1], -1).indices.sort(-1).values)
    assert_close(scores, exact.gather(-1, tokens), 1e-3)
    assert_close(built["key_mean"], keys.mean(2), 1e-6)


@properties
@given(seed=st.integers(0, 10**6), subspaces=st.sampled_from(["rope-pairs", "contiguous"]))
def test_a_list_holds_its_centroids_best_keys_and_their_scores(seed: int, subspaces: str) -> None:
    given = layer_input(seed)
    built = replace(SMALL, subspaces=subspaces).build_layer(given)
    _assert_lists_are_the_best(built, given)
    assert_close(built["centroids"].norm(dim=-1), torch.ones(2, 4, 6), 1e-3)


@properties
@given(seed=st.integers(0, 10**6), more=st.integers(0, 50))
def test_grown_lists_are_those_of_the_same_centroids_over_all_keys(seed: int, more: int) -> None:
    first = layer_input(seed)
    built = SMALL.build_layer(first)
    longer = layer_input(seed, middle=60 + more)
    keys = torch.cat([first.keys, longer.keys[:, 60:]], 1)
    grown_given = replace(longer, keys=keys)
    grown = SMALL.append_layer(built, grown_given, 60)
    assert grown.keys() == built.keys()
    assert all(torch.equal(grown[name], built[name]) for name in ("channels", "centroids"))
    assert grown["table_tokens"].shape[-1] == round(0.3 * (60 + more))
    _assert_lists_are_the_best(grown, grown_given)


def test_channels_are_kept_together_as_asked() -> None:
    given = layer_input()
    pairs = SMALL.build_layer(given)["channels"].tolist()
    assert pairs == [[0, 4, 1, 5], [2, 6, 3, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    contiguous = replace(SMALL, subspaces="contiguous").build_layer(given)["channels"]
    assert torch.equal(contiguous, torch.arange(16, dtype=torch.int32).view(4, 4))


def test_queries_of_all_heads_of_a_group_and_of_no_other_make_its_centroids() -> None:
    given = layer_input(Hk=2, G=2)
    assert given.queries is not None
    first = SMALL.build_layer(given)["centroids"]
    for head, group in ((0, 0), (1, 0), (2, 1), (3, 1)):
        queries = given.queries.clone()
        queries[head] = normal(5, *queries[head].shape)
        changed = SMALL.build_layer(replace(given, queries=queries))["centroids"]
        assert not torch.equal(changed[group], first[group])


def test_a_seed_makes_the_same_tables_and_another_one_others() -> None:
    first, again = (SMALL.build_layer(layer_input()) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(replace(SMALL, seed=1).build_layer(layer_input())["centroids"], first["centroids"])


def test_fewer_queries_than_centroids_make_as_many_centroids() -> None:
    assert SMALL.build_layer(layer_input(positions=2))["centroids"].shape == (2, 4, 4, 4)


def test_cosines_are_quantiles_of_the_first_half_of_the_tail() -> None:
    given = layer_input()
    built, tail = SMALL.build_layer(given), normal(3, 4, 33, 16)
    calibrated = SMALL.calibrate(lambda: iter([BuiltLayer(built, tail, given.facts)]))["cosines"]
    parts = split_channels(tail[:, :16].unflatten(0, (2, -1)).flatten(1, 2), built["channels"]).double()
    best = (torch.nn.functional.normalize(parts, dim=-1) @ built["centroids"].double().transpose(-1, -2)).amax(-1)
    assert calibrated == sorted(calibrated)
    for share in (0, 20, 50, 100):
        assert calibrated[share] == pytest.approx(float(best.flatten().quantile(share / 100)), abs=5e-3)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("subspace_size", 0, "--subspace-size 0: give at least 1"),
        ("centroids", 0, "--centroids 0"),
        ("iterations", 0, "--iterations 0"),
        ("query_sample", 0, "--query-sample 0"),
        ("query_sample", 65_537, "--query-sample 65537: give at most 65536"),
        ("alpha", 0.0, "--alpha 0"),
        ("alpha", 1.5, "--alpha 1.5"),
        ("subspaces", "odd", "--subspaces odd: choose one of rope-pairs, contiguous"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_their_flags(option: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        CSAttentionIndexer(**{option: value})


def _refusal(indexer: CSAttentionIndexer, rope: RopeFacts | None) -> str:
    given = layer_input()
    with pytest.raises(UsageError) as refusal:
        indexer.build_layer(replace(given, facts=given.facts.model_copy(update={"rope": rope})))
    return str(refusal.value)


def test_heads_that_cannot_be_divided_are_refused() -> None:
    assert "--subspace-size 3: the model's heads have 16 channels" in _refusal(replace(SMALL, subspace_size=3), HALVES)
    assert "--subspaces contiguous" in _refusal(replace(SMALL, subspace_size=1), HALVES)
    assert "give --subspaces contiguous" in _refusal(SMALL, None)


def test_a_layer_that_turns_nothing_has_neighbouring_channels() -> None:
    given = layer_input()
    unturned = given.facts.model_copy(update={"rope": RopeFacts(frequencies=[], interleaved=False)})
    built = replace(SMALL, subspace_size=1).build_layer(replace(given, facts=unturned))
    assert built["channels"].flatten().tolist() == list(range(16))


def test_it_is_built_when_it_is_asked_for() -> None:
    assert indexers()["csattention"] is CSAttentionIndexer
    assert "csattention" in choose_indexers(["all"])
    assert "csattention" not in choose_indexers([])
    assert asdict(CSAttentionIndexer())["query_sample"] == CSAttentionIndexer().queries_wanted()
