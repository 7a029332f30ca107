"""Re-ranking by exact logits: where every key is a candidate, the chosen are the best by exact probability."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.random_tensors import normal
from support.small_layer import as_queries, small_layer

from sparsekv.indexing.indexers.interface import LayerInput, indexers
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.selection.interface import Budget, MiddleContext, Selection, methods
from sparsekv.runtime.selection.token_choice import rerank_scores

BUILT: dict[str, dict[str, Any]] = {
    "codes": {"code_bytes": 4, "levels": (0.02,)},
    "csattention": {"subspace_size": 4, "subspaces": "contiguous", "centroids": 8, "alpha": 0.02},
    "pqcache": {"pq_bytes": 4},
}
ASKED: dict[str, dict[str, Any]] = {"csattention": {"csattention_scoring": "floor"}}
"""Options with which estimates are far too large: a key that no list has counts as much as the last of each list."""
HEADS, KEYS, D, CHOSEN = 2, 200, 64, 20


def loud_context(name: str, loud: float, group: int) -> MiddleContext:
    """A layer of an index, whose keys are so many times as large as those of a small layer."""
    layer = small_layer(middle=KEYS, Hk=HEADS, G=group, D=D)
    keys, values, facts = loud * layer.context.keys, layer.context.load_values(), layer.context.facts
    sample = normal(7, HEADS * group, 40, D)
    tensors = indexers()[name](**BUILT[name]).build_layer(LayerInput(keys, values, facts, layer.split, sample))
    if "token_order" in tensors:
        tensors["token_order"] = tensors["token_order"] - layer.split.sinks
    return replace(layer.context, load_keys=lambda: keys, tensors=tensors)


@pytest.mark.parametrize("loud", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("name", BUILT)
def test_the_best_of_all_keys_are_chosen(name: str, loud: float) -> None:
    """However far the estimate of the log-sum-exp is off: with one query head, it does not matter."""
    context = loud_context(name, loud, 1)
    query = normal(9, HEADS, 1, 4, D)
    selector = methods()[name](rerank=KEYS / CHOSEN, **ASKED.get(name, {})).prepare(context)
    chosen = selector.select(as_queries(query), Budget(CHOSEN))
    assert_best(chosen, context, query, joint=False)


@pytest.mark.parametrize("joint", [False, True], ids=["each", "joint"])
def test_clusters_that_weigh_too_little_give_no_query_head_more_weight(joint: bool) -> None:
    """The keys of a cluster are so far apart that its centroid's logit is far below that of the best of them."""
    context = loud_context("codes", 30.0, 3)
    query = normal(9, HEADS, 3, 4, D)
    chosen = Codes(rerank=KEYS / CHOSEN).prepare(context).select(as_queries(query, joint=joint), Budget(CHOSEN))
    assert_best(chosen, context, query, joint=joint)


def assert_best(chosen: Selection, context: MiddleContext, query: torch.Tensor, *, joint: bool) -> None:
    """The chosen tokens together have the probability of the best, by exact logits in float64."""
    logits = torch.einsum("hgqd,hmd->hgqm", query.double(), context.keys.double()) * context.facts.softmax_scale
    exact = logits.log_softmax(-1).logsumexp(1)
    exact = exact.logsumexp(1, keepdim=True) if joint else exact
    held = exact.gather(-1, chosen.rows.expand()[0]).logsumexp(-1)
    assert bool((held >= exact.topk(CHOSEN).values.logsumexp(-1) - 1e-3).all())


def test_probabilities_that_are_all_zero_in_float32_have_an_order() -> None:
    """A log-sum-exp that is far too large weighs a query head less, and does not make its candidates equal."""
    logits = normal(0, 1, 2, 3, 50)
    totals = torch.full((1, 2, 3), 500.0)
    expected = (logits.double() - 500).logsumexp(1)
    for joint in (False, True):
        scores = rerank_scores(logits, totals, joint=joint)
        order = (expected.logsumexp(1, keepdim=True) if joint else expected).argsort(-1)
        assert torch.equal(scores.argsort(-1), order)


def test_no_query_head_counts_more_than_its_own_probability() -> None:
    """An estimate below the candidates' log-sum-exp is raised to it."""
    logits = 10 * normal(0, 1, 2, 1, 50)
    totals = torch.tensor([[[0.0], [-200.0]]]) + logits.logsumexp(-1)
    expected = logits.double().log_softmax(-1).logsumexp(1)
    assert torch.allclose(rerank_scores(logits, totals, joint=False).double(), expected, atol=1e-4)
