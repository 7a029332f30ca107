"""Tests of the statistics of an index's clusters, against counts one by one and distances in float64."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import spread_by_definition, token_labels
from support.random_tensors import normal
from support.small_layer import SINKS, SmallLayer, small_layer

from sparsekv.kernels.kmeans.hierarchy import block_offsets
from sparsekv.runtime.methods.oracle import Oracle
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.cluster_statistics import Clustering, describe_clusters, relative_spreads

properties = settings(max_examples=15)
seeds = st.integers(0, 10**6)


def _described(layer: SmallLayer, biggest: int = 0) -> Clustering:
    """As from an index whose first middle token comes after the sinks."""
    values = layer.values[:, layer.middle]
    return describe_clusters(layer.context.tensors, layer.context.keys, values, SINKS, biggest)


def test_sizes_of_each_level_are_those_of_the_clusters_that_hold_tokens() -> None:
    layer = small_layer(repeated=120)
    levels = _described(layer).levels
    assert [one.level for one in levels] == [0, 1]
    assert levels[0].empty > 0
    for one in levels:
        counts = layer.context.tensors[f"level{one.level}.counts"].flatten().tolist()
        filled = [count for count in counts if count]
        assert (one.clusters, one.empty) == (len(counts), len(counts) - len(filled))
        assert one.single == filled.count(1)
        assert (one.min, one.max) == (min(filled), max(filled))
        assert (one.median, one.p99) == (np.quantile(filled, 0.5), np.quantile(filled, 0.99))


@properties
@given(seed=seeds, repeated=st.sampled_from([0, 120]), block=st.sampled_from([None, 64]))
def test_spreads_are_distances_from_the_clusters_means(seed: int, repeated: int, block: int | None) -> None:
    """Repeated keys leave clusters empty."""
    layer = small_layer(seed, repeated=repeated, block=block)
    levels = _described(layer).levels
    assert len(levels) == 2
    for one in levels:
        labels = token_labels(layer.context.tensors, one.level)
        assert one.key_spread == pytest.approx(spread_by_definition(layer.context.keys, labels), rel=1e-4)
        assert one.value_spread == pytest.approx(spread_by_definition(layer.values[:, layer.middle], labels), rel=1e-4)


@properties
@given(seed=seeds, far=st.sampled_from([0.0, 50.0]))
def test_one_token_a_cluster_loses_nothing_and_one_cluster_of_all_everything(seed: int, far: float) -> None:
    rows, tokens = normal(seed, 2, 40, 8) + far, torch.arange(40).expand(2, -1)
    tensors = {
        "token_order": tokens.flip(1),
        "level0.counts": torch.ones(2, 40, dtype=torch.int32),
        "level0.parent": torch.zeros(2, 40, dtype=torch.int32),
        "level0.centroids": rows.flip(1),
        "level1.counts": torch.full((2, 1), 40, dtype=torch.int32),
        "level1.centroids": rows.mean(1, keepdim=True),
    }
    assert relative_spreads(rows, tensors, "centroids") == [0.0, pytest.approx(1.0, rel=1e-4)]


def test_rows_that_are_all_the_same_lose_nothing() -> None:
    layer = small_layer()
    same = normal(1, 2, 1, 16).expand(-1, 200, -1)
    tensors = layer.context.tensors | {
        f"level{level}.value_centroids": same[:, : layer.context.tensors[f"level{level}.counts"].shape[1]]
        for level in range(2)
    }
    assert relative_spreads(same, tensors, "value_centroids") == [0.0, 0.0]


def test_an_index_without_value_centroids_has_no_value_spread() -> None:
    layer = small_layer()
    tensors = {name: tensor for name, tensor in layer.context.tensors.items() if "value_centroids" not in name}
    without = _described(replace(layer, context=replace(layer.context, tensors=tensors)))
    assert without.levels == [replace(one, value_spread=None) for one in _described(layer).levels]
    assert all(one.key_spread for one in without.levels)


def test_blocks_are_cut_where_the_tokens_say_and_hold_their_own_clusters() -> None:
    layer = small_layer(block=64)
    blocks, cuts = _described(layer).blocks, block_offsets(200, 64)
    assert [(one.start, one.stop) for one in blocks] == [
        (SINKS + start, SINKS + stop) for start, stop in pairwise(cuts)
    ]
    assert [one.tokens for one in blocks] == [64, 64, 72]
    assert [one.open for one in blocks] == [False, False, True]
    labels, first = token_labels(layer.context.tensors), 0
    for one in blocks:
        of_block = labels[:, one.start - SINKS : one.stop - SINKS]
        assert first <= int(of_block.min()) <= int(of_block.max()) < first + one.clusters
        first += one.clusters
    assert first == layer.context.tensors["level0.counts"].shape[1]
    assert _described(small_layer()).blocks == []


def test_biggest_clusters_come_first_with_their_tokens() -> None:
    layer = small_layer()
    context = replace(layer.context, first_token=SINKS)
    tensors = context.tensors
    described = Squeezed.describe_clusters(context, layer.values[:, layer.middle], 5)
    assert torch.equal(described.counts, tensors["level0.counts"])
    sizes = [len(cluster.positions) for cluster in described.biggest]
    assert sizes == sorted(tensors["level0.counts"].flatten().tolist(), reverse=True)[:5]
    for cluster in described.biggest:
        start, stop = tensors["token_offsets"][cluster.kv_head, cluster.cluster :][:2].tolist()
        order = tensors["token_order"][cluster.kv_head, start:stop]
        assert cluster.positions == sorted(SINKS + position for position in order.tolist())


@properties
@given(seed=seeds, repeated=st.sampled_from([0, 120]))
def test_a_clusters_spread_is_its_keys_distance_over_that_of_the_head(seed: int, repeated: int) -> None:
    layer = small_layer(seed, repeated=repeated)
    keys, described = layer.context.keys.double(), _described(layer, 1000)
    labels = token_labels(layer.context.tensors)
    for one in described.biggest:
        inside = keys[one.kv_head][labels[one.kv_head] == one.cluster]
        whole = (keys[one.kv_head] - keys[one.kv_head].mean(0)).square().sum(-1).mean()
        apart = (inside - inside.mean(0)).square().sum(-1).mean()
        assert one.key_spread == pytest.approx(float((apart / whole).sqrt()), rel=1e-3, abs=1e-4)
    several = [one for one in described.biggest if len(one.positions) > 1]
    assert [one.key_spread for one in described.most_spread] == sorted(
        (one.key_spread for one in several), reverse=True
    )


def test_clusters_of_one_token_are_never_the_most_spread_and_empty_ones_never_the_biggest() -> None:
    layer = small_layer(repeated=120)
    counts = layer.context.tensors["level0.counts"]
    assert 0 < int((counts > 1).sum()) < int((counts > 0).sum()) < counts.numel()
    described = _described(layer, counts.numel())
    assert len(described.biggest) == int((counts > 0).sum())
    assert len(described.most_spread) == int((counts > 1).sum())
    assert all(len(one.positions) > 1 for one in described.most_spread)


def test_more_clusters_than_there_are_lists_all_and_a_method_without_them_none() -> None:
    layer = small_layer(levels=(0.02,))
    assert len(_described(layer, 1000).biggest) == 2 * 4
    assert Oracle.describe_clusters(layer.context, layer.context.load_values(), 1000) is None
