"""Tests of the statistics of query-centric lists, against loops over queries, keys and lists in float64."""

import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.small_layer import SINKS
from support.small_tables import SMALL, TabledLayer, tabled_layer

from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.cluster_statistics import ListShape, subspace_shares

properties = settings(max_examples=10)
seeds = st.integers(0, 10**6)


def _described(small: TabledLayer) -> ListShape:
    return CSAttention.describe_lists(small.layer.context, small.layer.queries)


def _shares_by_definition(queries: torch.Tensor, keys: torch.Tensor, channels: torch.Tensor) -> list[list[float]]:
    """From every logit of queries [R, D] with keys [M, D], subspace by subspace."""
    shares = []
    for query in queries.double().tolist():
        deviations = []
        for part in channels.tolist():
            logits = [sum(query[channel] * key[channel] for channel in part) for key in keys.double().tolist()]
            deviations.append(statistics.pstdev(logits))
        shares.append([one / sum(deviations) for one in deviations])
    return shares


@properties
@given(seed=seeds, far=st.sampled_from([0.0, 30.0]), subspaces=st.sampled_from(["contiguous", "rope-pairs"]))
def test_shares_are_those_of_the_logits_deviations(seed: int, far: float, subspaces: str) -> None:
    """An offset that all keys have in common ranks no key."""
    small = tabled_layer(seed, replace(SMALL, subspaces=subspaces), queries=3)
    context, queries = small.layer.context, small.layer.queries
    far_keys = context.keys + far
    described = CSAttention.describe_lists(replace(context, load_keys=lambda: far_keys), queries)
    heads = zip(queries, far_keys, strict=True)
    expected = [
        share
        for query, keys in heads
        for share in _shares_by_definition(query.flatten(0, 1), keys, context.tensors["channels"])
    ]
    means = [statistics.mean(column) for column in zip(*expected, strict=True)]
    ranked = [statistics.mean(column) for column in zip(*(sorted(one, reverse=True) for one in expected), strict=True)]
    assert described.subspace_shares == pytest.approx(means, rel=1e-6)
    assert described.ranked_shares == pytest.approx(ranked, rel=1e-6)
    assert sum(described.subspace_shares) == pytest.approx(1)


@pytest.mark.parametrize("alpha", [0.02, 0.3, 1.0])
def test_keys_are_counted_in_each_list_of_their_head(alpha: float) -> None:
    small = tabled_layer(indexer=replace(SMALL, alpha=alpha))
    described, tokens = _described(small), small.tensors["table_tokens"]
    Hk, m, C, L = tokens.shape
    assert (described.lists, described.entries) == (Hk * m * C, L)
    listings = []
    for head in tokens:
        lists = [set(entries) for entries in head.flatten(0, 1).tolist()]
        listings += [sum(SINKS + key in entries for entries in lists) for key in range(small.given.split.middle)]
    assert described.keys_listed == statistics.mean(count > 0 for count in listings)
    assert described.in_lists == statistics.median_low(listings) / (m * C)
    assert (described.keys_listed < 1) == (alpha == 0.02)


def test_a_subspace_whose_keys_are_alike_ranks_none_and_keys_all_alike_are_ranked_by_no_subspace() -> None:
    queries, channels = normal(0, 5, 8), torch.arange(8).view(2, 4)
    keys = normal(1, 40, 8)
    keys[:, :4] = 0.5
    assert torch.equal(subspace_shares(queries, keys, channels), torch.tensor([[0.0, 1.0]] * 5).double())
    alike = torch.full((40, 8), 0.5)
    assert torch.equal(subspace_shares(queries, alike, channels), torch.full((5, 2), 0.5).double())


def test_a_method_without_lists_has_none_and_one_with_them_no_clusters() -> None:
    layer = tabled_layer().layer
    context = layer.context
    assert Squeezed.describe_lists(context, layer.queries) is None
    assert CSAttention.describe_clusters(context, context.load_values(), 2) is None
