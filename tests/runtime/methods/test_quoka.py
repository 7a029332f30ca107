"""QuoKA and SampleAttention while decoding and for a question: what they choose, and that all keys count as read."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choices import assert_best
from support.small_layer import all_chosen, as_queries, small_layer

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.methods.quoka import Quoka
from sparsekv.runtime.methods.sampleattention import SampleAttention
from sparsekv.runtime.selection.interface import Budget

properties = settings(max_examples=15)
middles, budgets, seeds = st.integers(5, 80), st.integers(1, 90), st.integers(0, 10**6)


@properties
@given(seed=seeds, middle=middles, budget=budgets, similarity=st.sampled_from(["cosine", "dot"]))
def test_each_query_takes_the_keys_of_highest_mean_cosine(seed: int, middle: int, budget: int, similarity: str) -> None:
    layer = small_layer(seed, middle=middle)
    query, keys = layer.queries.double(), layer.context.keys.double()
    query = query / query.norm(dim=-1, keepdim=True) if similarity == "cosine" else query
    keys = keys / keys.norm(dim=-1, keepdim=True) if similarity == "cosine" else keys
    selector = Quoka(quoka_similarity=similarity).prepare(layer.context)
    selection = selector.select(as_queries(layer.queries), Budget(budget))
    scores = torch.einsum("hgqd,hmd->hgqm", query, keys).mean(1)
    assert_best(all_chosen(selection, selector), scores, min(budget, middle))
    assert selection.cost.index_rows == middle


@properties
@given(seed=seeds, middle=middles, budget=budgets, kept=st.integers(1, 40), across=st.sampled_from(["max", "mean"]))
def test_a_question_takes_what_its_least_ordinary_queries_are_nearest_to(
    seed: int, middle: int, budget: int, kept: int, across: str
) -> None:
    layer = small_layer(seed, middle=middle)
    query, keys = (rows / rows.norm(dim=-1, keepdim=True) for rows in (layer.queries.double(), layer.context.keys))
    mean = layer.queries.double().mean(2, keepdim=True)
    nearness = torch.cosine_similarity(layer.queries.double(), mean, dim=-1)
    # Where all are kept they stay in order, so that the heads of a group are averaged token by token.
    order = nearness.argsort(-1)[..., :kept] if kept < nearness.shape[-1] else nearness.argsort(-1).sort(-1).values
    places = order[..., None].expand(-1, -1, -1, query.shape[-1])
    scores = torch.einsum("hgqd,hmd->hgqm", query.gather(2, places), keys.double()).mean(1)
    scores = scores.amax(1, keepdim=True) if across == "max" else scores.mean(1, keepdim=True)
    selector = Quoka(prefill_queries=kept, quoka_across=across).prepare(layer.context)
    selection = selector.select(as_queries(layer.queries, joint=True), Budget(budget))
    assert_best(all_chosen(selection, selector), scores, min(budget, middle))


@properties
@given(seed=seeds, middle=middles, budget=budgets, kept=st.integers(1, 40), shared=st.booleans())
def test_sampled_queries_take_what_they_attend_to(seed: int, middle: int, budget: int, kept: int, shared: bool) -> None:
    layer = small_layer(seed, middle=middle)
    exact = layer.queries.mean(-1)
    total = layer.queries.shape[2]
    places = [(i + 1) * total // min(kept, total) - 1 for i in range(min(kept, total))] if shared else range(total)
    logits = torch.einsum("hgqd,hmd->hgqm", layer.queries.double(), layer.context.keys.double())
    weights = (logits * layer.context.facts.softmax_scale).exp()
    scores = (weights / (weights.sum(-1) + exact.double().exp())[..., None])[:, :, list(places)].mean(1)
    scores = scores.mean(1, keepdim=True) if shared else scores
    selector = SampleAttention(prefill_queries=kept).prepare(layer.context)
    selection = selector.select(as_queries(layer.queries, exact, joint=shared), Budget(budget))
    assert_best(all_chosen(selection, selector), scores, min(budget, middle))
    assert selection.cost.index_rows == middle


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_queries": 0}, "--prefill-queries 0: give at least 1"),
        ({"quoka_subset": "near"}, "--quoka-subset near: choose one of far, random, all"),
        ({"quoka_similarity": "l2"}, "--quoka-similarity l2: choose one of cosine, dot"),
        ({"quoka_across": "sum"}, "--quoka-across sum: choose one of max, mean"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Quoka(**options)
