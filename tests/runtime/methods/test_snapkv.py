"""SnapKV: pooled attention of a window of queries, and one choice from a question to the end of its answer."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choices import assert_best, recorded_choices
from support.configs import sparse
from support.random_tensors import normal
from support.small_index import random_ids, stepped_logits
from support.small_layer import SmallLayer, all_chosen, as_queries, small_layer

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.selection.interface import Budget
from sparsekv.runtime.selection.wrappers import ResidualSelector, residual_clusters

properties = settings(max_examples=15)
FORMS = st.builds(
    SnapKV,
    window_queries=st.integers(1, 40),
    pool_size=st.sampled_from([1, 3, 7, 13]),
    pooling=st.sampled_from(["max", "average"]),
)


def _pooled_sums(layer: SmallLayer, queries: torch.Tensor, exact: torch.Tensor, method: SnapKV) -> torch.Tensor:
    """[Hk, 1, M] float64, head by head and token by token."""
    facts, keys, window = layer.context.facts, layer.context.keys.double(), slice(-method.window_queries, None)
    logits = torch.einsum("hgqd,hmd->hgqm", queries[:, :, window].double(), keys) * facts.softmax_scale
    if facts.softcap is not None:
        logits = facts.softcap * torch.tanh(logits / facts.softcap)
    weights = logits.exp()
    summed = (weights / (weights.sum(-1) + exact[:, :, window].double().exp())[..., None]).sum(2)
    reach, middle = method.pool_size // 2, summed.shape[-1]
    around = [summed[..., max(0, token - reach) : token + reach + 1] for token in range(middle)]
    pooled = [near.amax(-1) if method.pooling == "max" else near.sum(-1) / method.pool_size for near in around]
    return torch.stack(pooled, -1).mean(1)[:, None]


@properties
@given(
    seed=st.integers(0, 10**6),
    middle=st.integers(8, 60),
    budget=st.integers(1, 70),
    method=FORMS,
    softcap=st.sampled_from([None, 3.0]),
)
def test_a_window_keeps_what_it_attends_to_and_its_neighbours(
    seed: int, middle: int, budget: int, method: SnapKV, softcap: float | None
) -> None:
    """The prompt's own window until a question comes, and then the question's, beside what else it attends to."""
    layer = small_layer(seed, middle=middle, softcap=softcap)
    observed = layer.context.load_observed()
    selector, tokens = method.prepare(layer.context), min(budget, middle)
    one = as_queries(normal(seed + 1, 2, 3, 1, 16))
    before = _pooled_sums(layer, observed, torch.full(observed.shape[:3], -torch.inf), method)
    assert_best(all_chosen(selector.select(one, Budget(budget)), selector), before, tokens)

    exact = 2 * normal(seed + 2, *layer.queries.shape[:3])
    after = _pooled_sums(layer, layer.queries, exact, method)
    question = selector.select(as_queries(layer.queries, exact, joint=True), Budget(budget))
    assert question.cost.index_rows == 0
    for selection in (question, selector.select(one, Budget(budget))):
        assert_best(all_chosen(selection, selector), after, tokens)
    selector.forget_question()
    assert_best(all_chosen(selector.select(one, Budget(budget)), selector), before, tokens)


def test_other_budgets_are_cut_from_the_same_ranking() -> None:
    layer = small_layer(middle=50)
    selector = SnapKV().prepare(layer.context)
    selector.select(as_queries(layer.queries, joint=True), Budget(5))
    few, more = (all_chosen(selector.select(as_queries(layer.queries), Budget(n)), selector) for n in (5, 20))
    assert [[tokens[:5] for tokens in head] for head in more] == few


def test_a_question_that_another_method_chose_for_decides_too() -> None:
    """Also beneath centroids that stand for what is left."""
    layer = small_layer(middle=50, block=50)
    question, one = as_queries(layer.queries, joint=True), as_queries(layer.queries[:, :, :1])
    selecting, observing = (SnapKV().prepare(layer.context) for _ in range(2))
    replaced = ResidualSelector(observing, residual_clusters(layer.context.tensors))
    before = all_chosen(replaced.select(one, Budget(9)), replaced)
    selecting.select(question, Budget(5))
    assert replaced.conversation is not None
    assert replaced.conversation.observe is not None
    replaced.conversation.observe(question)
    wanted = all_chosen(selecting.select(one, Budget(9)), selecting)
    assert all_chosen(replaced.select(one, Budget(9)), replaced) == wanted != before


def test_a_tokens_neighbours_are_kept_with_it() -> None:
    layer = small_layer(middle=40, Hk=1, G=1)
    keys = torch.zeros(1, 40, 16)
    keys[0, 20, 0] = 9.0
    queries = torch.zeros(1, 1, 4, 16)
    queries[..., 0] = 9.0
    context = replace(layer.context, load_keys=lambda: keys, load_observed=lambda: queries)
    selector = SnapKV(pool_size=5).prepare(context)
    assert sorted(all_chosen(selector.select(as_queries(queries, joint=True), Budget(5)), selector)[0][0]) == [
        *range(18, 23)
    ]


def test_an_answer_attends_to_what_its_question_chose(index: OpenIndex) -> None:
    cache = index.cache(sparse("snapkv", SnapKV(), Budget(20)))
    kept = []
    for seed in (0, 1, 0):
        with recorded_choices(cache) as layers:
            stepped_logits(index, cache, random_ids(14, seed), question=9)
        for choices in layers:
            assert len(choices) == 6
            assert all(choice.tokens == choices[0].tokens for choice in choices)
            assert len(choices[0].tokens[0][0]) == 20
        kept.append([choices[0].tokens for choices in layers])
    assert kept[0] == kept[2] != kept[1]

    with recorded_choices(cache) as layers:
        stepped_logits(index, cache, random_ids(3), question=1)
    unasked = index.cache(sparse("snapkv", SnapKV(), Budget(20)))
    with recorded_choices(unasked) as fresh:
        stepped_logits(index, unasked, random_ids(3), question=1)
    assert [choices[0].tokens for choices in layers] == [choices[0].tokens for choices in fresh]
    assert [choices[0].tokens for choices in layers] != kept[0]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"window_queries": 0}, "--window-queries 0: give at least 1"),
        ({"pool_size": 4}, "--pool-size 4: give an odd number"),
        ({"pool_size": -1}, "--pool-size -1: give an odd number"),
        ({"pooling": "median"}, "--pooling median: choose one of max, average"),
    ],
)
def test_a_window_that_cannot_be_is_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SnapKV(**parameters)
