"""The union of several queries' choices: all that each of them chooses, and centroids for exactly the rest."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.coded_layer import coded_layer
from support.small_layer import SINKS, TAIL, SmallLayer, all_chosen, as_queries, small_layer

from sparsekv.formats.index.schema import Split
from sparsekv.indexing.indexers.interface import LayerInput
from sparsekv.indexing.methods.pqcache import PQCacheIndexer
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.keydiff import KeyDiff
from sparsekv.runtime.methods.loki import Loki
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.oracle import Oracle
from sparsekv.runtime.methods.pqcache import PQCache
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.sparq import SparQ
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.methods.window import Window
from sparsekv.runtime.selection.interface import Budget, Selector
from sparsekv.runtime.selection.wrappers import ResidualSelector, residual_clusters, unite

METHODS: dict[str, Any] = {
    "flat": Squeezed("flat"),
    "hierarchical": Squeezed("hierarchical"),
    "threshold": Squeezed("hierarchical", "threshold"),
    "quest": Quest(page_size=7),
    "oracle": Oracle(),
    "window": Window(),
    "keydiff": KeyDiff(),
    "loki": Loki(dims=5),
}


layers = functools.cache(small_layer)


def replacing(layer: SmallLayer, name: str) -> Selector:
    """A selector whose centroids are attended for the rest."""
    if name.startswith("multipole"):
        return Multipole("hierarchical" if "hierarchical" in name else "flat").prepare(layer.context)
    tensors = layers(1, block=64).context.tensors
    return ResidualSelector(METHODS[name].prepare(layer.context), residual_clusters(tensors))


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=15)
@given(seed=st.integers(0, 999), queries=st.integers(1, 9), budget=st.integers(1, 220))
def test_it_is_all_that_each_query_chooses(name: str, seed: int, queries: int, budget: int) -> None:
    layer = layers(seed % 3)
    selector = METHODS[name].prepare(layer.context)
    asked = as_queries(layer.queries[:, :, :queries])
    each = selector.select(asked, Budget(budget))
    together = unite(each, selector, layer.split.middle)
    for own, (union,) in zip(all_chosen(each, selector), all_chosen(together, selector), strict=True):
        assert set(union) == {token for one in own for token in one}
        assert len(set(union)) == len(union)


@pytest.mark.parametrize("name", ["multipole", "multipole hierarchical", "quest", "oracle"])
@settings(max_examples=15)
@given(queries=st.integers(1, 9), budget=st.integers(1, 200))
def test_centroids_represent_what_nobody_chooses(name: str, queries: int, budget: int) -> None:
    layer = layers(1, block=64)
    selector = replacing(layer, name)
    together = unite(selector.select(as_queries(layer.queries[:, :, :queries]), Budget(budget)), selector, 200)
    (left,) = together.attended_segments()
    tokens = torch.as_tensor(together.rows.counts())[:, 0]
    assert torch.allclose(left.log_counts.exp().sum(-1)[:, 0] + tokens, torch.tensor(200.0))
    assert bool((left.log_counts.exp() >= 0).all())


@pytest.mark.parametrize(("name", "budget"), [("multipole", 20), ("quest", 20), ("multipole hierarchical", 120)])
def test_of_one_query_it_is_its_own_choice(name: str, budget: int) -> None:
    """A hierarchical lookup scores all finest clusters, too, from a quarter of the tokens on."""
    layer = layers(1, block=64)
    selector = replacing(layer, name)
    own = selector.select(as_queries(layer.queries[:, :, :1]), Budget(budget))
    together = unite(own, selector, 200)
    (left,), (left_of_one,) = together.attended_segments(), own.attended_segments()
    assert torch.allclose(left.log_counts.exp(), left_of_one.log_counts.exp(), atol=1e-4)
    assert (
        torch.as_tensor(together.rows_read()).expand(2, 1).equal(torch.as_tensor(own.rows_read()).expand(2, 1).float())
    )


def test_the_rest_down_a_hierarchy_is_of_all_finest_clusters_and_counts_each_once() -> None:
    """Each query opens other clusters, so what is left is represented by those that all of them have."""
    layer = layers(1, block=64)
    selector = replacing(layer, "multipole hierarchical")
    own = selector.select(as_queries(layer.queries[:, :, :2]), Budget(20))
    together = unite(own, selector, 200)
    (left,) = together.attended_segments()
    assert len(own.attended_segments()) > 1
    assert left.keys.equal(layer.context.tensors["level0.centroids"])
    coarse, fine = (layer.context.tensors[f"level{level}.centroids"].shape[1] for level in (1, 0))
    assert together.cost.index_rows == coarse + 2.0 * fine


def test_what_all_queries_read_counts_once() -> None:
    """The coarse clusters, and the centroids of the rest; the opened clusters of each query count for each."""
    layer = layers(1)
    inner = Squeezed("hierarchical").prepare(layer.context)
    selector = ResidualSelector(inner, residual_clusters(layers(1, block=64).context.tensors))
    one, several = as_queries(layer.queries[:, :, :1]), as_queries(layer.queries[:, :, :1].expand(-1, -1, 5, -1))
    coarse, rest = layer.context.tensors["level1.counts"].shape[1], 2 * selector.clusters.keys.shape[1]
    opened = inner.select(one, Budget(20)).cost.index_rows - coarse
    read = unite(selector.select(several, Budget(20)), selector, 200).cost.index_rows
    assert torch.as_tensor(read).equal(coarse + rest + 5 * torch.as_tensor(opened))


def _sparq() -> tuple[Selector, float]:
    return SparQ(channels=4, mean_value=False).prepare(layers(1).context), 200 * 4 / 16


def _pqcache() -> tuple[Selector, float]:
    context = layers(1).context
    split, indexer = Split(sinks=SINKS, middle=200, tail=TAIL), PQCacheIndexer(pq_bytes=4, iterations=3)
    tensors = indexer.build_layer(LayerInput(context.keys, context.keys, context.facts, split))
    return PQCache(rerank=2.0).prepare(replace(context, tensors=tensors)), 20


def _codes() -> tuple[Selector, float]:
    """A key has 64 bytes and its code 4; half of the codes are scanned."""
    _, context = coded_layer(200, device=torch.device("cpu"))
    return Codes(rerank=2.0, scan=0.5, replace=False).prepare(context), 20 + 100 * 4 / 64


@pytest.mark.parametrize("make", [_sparq, _pqcache, _codes])
def test_what_each_query_reads_for_itself_counts_for_each_but_a_row_of_a_token_once(
    make: Callable[[], tuple[Selector, float]],
) -> None:
    """Its channels of all keys, the keys of its candidates, and the codes of its clusters."""
    selector, own = make()

    def read(queries: int) -> float:
        asked = as_queries(layers(1).queries[:, :, :queries])
        return float(unite(selector.select(asked, Budget(20)), selector, 200).cost.index_rows)

    for queries in (2, 3, 32):
        assert read(queries) - read(1) == pytest.approx(min(200, queries * own) - own)
