"""PQCache's choice: the best keys by the products of queries with decoded codes, and a second look at more of them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choices import assert_best
from support.estimates import double_logits, group_scores
from support.random_tensors import normal
from support.reference import assert_close
from support.small_layer import SINKS, TAIL, SmallLayer, all_chosen, as_queries, small_layer

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import Split
from sparsekv.indexing.indexers.interface import LayerInput
from sparsekv.indexing.methods.pqcache import PQCacheIndexer
from sparsekv.runtime.methods.pqcache import PQCache
from sparsekv.runtime.selection.interface import Budget, MiddleContext

properties = settings(max_examples=10)
choices = pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])


def _encoded(layer: SmallLayer, pq_bytes: int = 4) -> MiddleContext:
    keys, facts = layer.context.keys, layer.context.facts
    split = Split(sinks=SINKS, middle=keys.shape[1], tail=TAIL)
    indexer = PQCacheIndexer(pq_bytes=pq_bytes, iterations=3)
    return replace(layer.context, tensors=indexer.build_layer(LayerInput(keys, keys, facts, split)))


def _decoded(context: MiddleContext) -> torch.Tensor:
    """[Hk, M, D] float64, one key and part after the other."""
    codes, books = context.tensors["codes"], context.tensors["codebooks"].double()
    heads = [
        torch.stack([torch.cat([book[part, code] for part, code in enumerate(key)]) for key in of_head.tolist()])
        for of_head, book in zip(codes, books, strict=True)
    ]
    return torch.stack(heads)


@properties
@given(seed=st.integers(0, 10**6), middle=st.integers(5, 300), softcap=st.sampled_from([None, 2.0]))
def test_estimates_are_the_products_with_decoded_keys(seed: int, middle: int, softcap: float | None) -> None:
    layer = small_layer(seed, middle=middle, softcap=softcap)
    context = _encoded(layer)
    estimates = PQCache().prepare(context).estimates(layer.queries)
    assert_close(estimates, double_logits(layer.queries, _decoded(context), context.facts), 1e-5)


@choices
@properties
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 320))
def test_the_best_by_the_groups_estimated_probability_are_chosen(shared: bool, seed: int, budget: int) -> None:
    layer = small_layer(seed, middle=300)
    context, exact = _encoded(layer), normal(seed, 2, 3, TAIL)
    selector = PQCache().prepare(context)
    chosen = all_chosen(selector.select(as_queries(layer.queries, exact, joint=shared), Budget(budget)), selector)
    estimates = double_logits(layer.queries, _decoded(context), context.facts)
    assert_best(chosen, group_scores(estimates, exact, shared=shared), min(budget, 300))


@choices
def test_a_second_look_takes_the_best_by_exact_logits_of_those_that_were_read(shared: bool) -> None:
    layer = small_layer(middle=300)
    # Two bytes, as of keys with the same code any may be read.
    context, exact = _encoded(layer, pq_bytes=2), normal(9, 2, 3, TAIL)
    selector = PQCache(rerank=2.5).prepare(context)
    asking = as_queries(layer.queries, exact, joint=shared)
    chosen = all_chosen(selector.select(asking, Budget(20)), selector)
    estimates = double_logits(layer.queries, _decoded(context), context.facts)
    read = group_scores(estimates, exact, shared=shared).topk(50, -1).indices
    known = read[:, None].expand(-1, 3, TAIL, -1)
    seen = estimates.scatter(-1, known, double_logits(layer.queries, context.keys, context.facts).gather(-1, known))
    scores = group_scores(seen, exact, shared=shared)
    assert_best(chosen, torch.full_like(scores, -1).scatter(-1, read, scores.gather(-1, read)), 20)
    assert chosen != all_chosen(PQCache().prepare(context).select(asking, Budget(20)), selector)


@choices
@pytest.mark.parametrize("way", ["a code for each key", "a second look at everything"])
def test_with_all_there_is_to_know_it_chooses_as_the_oracle(way: str, shared: bool) -> None:
    layer = small_layer(middle=200 if way == "a code for each key" else 300)
    keys = layer.context.keys.half().float()
    context = _encoded(replace(layer, context=replace(layer.context, load_keys=lambda: keys)))
    exact, rerank = normal(5, 2, 3, TAIL), 1.0 if way == "a code for each key" else 1e3
    selector = PQCache(rerank=rerank).prepare(context)
    chosen = all_chosen(selector.select(as_queries(layer.queries, exact, joint=shared), Budget(17)), selector)
    truth = double_logits(layer.queries, keys, context.facts)
    assert_best(chosen, group_scores(truth, exact, shared=shared), 17)


@pytest.mark.parametrize(
    ("rerank", "budget", "again"),
    [(1.0, 30, 0), (1.5, 30, 15), (1.01, 30, 1), (9.0, 30, 240), (20.0, 30, 270), (4.0, 300, 0)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_codebooks_and_keys_that_are_looked_at_again_are_read(
    rerank: float, budget: int, again: int, dtype: torch.dtype
) -> None:
    layer = small_layer(middle=300)
    context = _encoded(layer)
    selector = PQCache(rerank=rerank).prepare(replace(context, load_keys=lambda: context.keys.to(dtype)))
    selection = selector.select(as_queries(layer.queries.to(dtype)), Budget(budget))
    # 300 codes of 4 bytes, and 256 centroids of 16 channels in float16, over a row of 16 channels.
    row = 16 * (4 if dtype == torch.float32 else 2)
    assert selection.cost.index_rows == pytest.approx((300 * 4 + 256 * 16 * 2) / row + again)
    assert int(selection.rows.lengths.sum(-1).min()) == int(selection.rows.lengths.sum(-1).max()) == budget


@pytest.mark.parametrize("rerank", [0.9, float("inf"), float("nan")])
def test_fewer_keys_than_the_budget_are_refused(rerank: float) -> None:
    with pytest.raises(UsageError, match=f"--rerank {rerank:g}: give at least 1"):
        PQCache(rerank=rerank)
