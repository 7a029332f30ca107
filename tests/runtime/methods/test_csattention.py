"""CSAttention: exact where its tables lose nothing, searched for as often as asked, and taking new keys in."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.configs import sparse
from support.random_tensors import normal
from support.reference import assert_close
from support.replaced import Step
from support.small_index import build_small, plain_logits, random_ids, stepped_logits
from support.small_layer import all_chosen, as_queries
from support.small_tables import SMALL, TabledLayer, layer_input, tabled_layer

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.methods.csattention import CSAttentionIndexer
from sparsekv.kernels.posting_lists.posting_lists import SCORINGS, cosines, estimate_logits, look_up
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.methods.oracle import Oracle
from sparsekv.runtime.reporting.recall import MeasuredQueries
from sparsekv.runtime.reporting.report import recall_report
from sparsekv.runtime.selection.interface import Budget
from sparsekv.runtime.selection.wrappers import unite

properties = settings(max_examples=15)
EXACT = CSAttentionIndexer(subspace_size=16, centroids=40, alpha=1.0, query_sample=64)


@properties
@given(seed=st.integers(0, 10**6), queries=st.sampled_from([1, 5]))
@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_budget_of_everything_is_dense_attention(scoring: str, queries: int, seed: int) -> None:
    layer = tabled_layer(seed).layer
    selector = CSAttention(csattention_scoring=scoring).prepare(layer.context)
    step = Step(layer, selector, Budget(1.0), queries=queries, seed=seed)
    assert_close(step.output, step.dense(), 1e-5)


def _known_queries(seed: int) -> TabledLayer:
    """A layer with a centroid for each query that is asked, and lists of all keys."""
    given = layer_input(seed, positions=8)
    tabled = tabled_layer(seed, EXACT, given)
    assert given.queries is not None
    return replace(tabled, layer=replace(tabled.layer, queries=given.queries.unflatten(0, (2, -1))))


@properties
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 60), shared=st.booleans())
def test_with_a_centroid_for_each_query_and_whole_lists_it_chooses_what_the_oracle_does(
    seed: int, budget: int, shared: bool
) -> None:
    layer = _known_queries(seed).layer
    chosen, best = (
        method.prepare(layer.context).select(as_queries(layer.queries, joint=shared), Budget(budget))
        for method in (CSAttention(), Oracle())
    )
    logits = torch.einsum("hgqd,hmd->hgqm", layer.queries.double(), layer.context.keys.double())
    probability = (logits * layer.context.facts.softmax_scale).softmax(-1).mean(1)
    probability = probability.mean(1, keepdim=True) if shared else probability
    mass = [probability.gather(-1, one.rows.starts).sum(-1) for one in (chosen, best)]
    # Keys that float16 scores cannot tell apart may stand for one another.
    assert_close(mass[0], mass[1], 1e-3)
    assert bool((chosen.rows.starts.diff(dim=-1) > 0).all())


@properties
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 15))
def test_the_order_of_the_middle_does_not_matter(seed: int, budget: int) -> None:
    given = layer_input(seed)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
    moved = replace(given, keys=given.keys[:, order], values=given.values[:, order])
    outputs = []
    for one in (given, moved):
        layer = tabled_layer(seed, given=one).layer
        step = Step(layer, CSAttention().prepare(layer.context), Budget(budget), seed=seed)
        outputs.append(step.output)
    assert_close(outputs[1], outputs[0], 1e-5)


@properties
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 80))
@pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])
def test_the_budgets_tokens_are_chosen_once_each(shared: bool, seed: int, budget: int) -> None:
    layer = tabled_layer(seed).layer
    selector = CSAttention().prepare(layer.context)
    selection = selector.select(as_queries(layer.queries, joint=shared), Budget(budget))
    assert selection.rows.starts.shape[1] == (1 if shared else 8)
    for of_head in all_chosen(selection, selector):
        assert all(len(tokens) == len(set(tokens)) == min(budget, 60) for tokens in of_head)


def test_probabilities_are_averaged_over_the_group_and_a_question() -> None:
    tabled = tabled_layer()
    layer, tables = tabled.layer, tabled.tables
    logits = estimate_logits(tables, look_up(tables, layer.queries.flatten(1, 2)), "mean").double()
    probability = (logits * layer.context.facts.softmax_scale).softmax(-1).unflatten(1, (2, 8))
    selector = CSAttention(rerank=1.0).prepare(layer.context)
    alone = selector.select(as_queries(layer.queries), Budget(7)).rows.starts
    together = selector.select(as_queries(layer.queries, joint=True), Budget(7)).rows.starts
    assert torch.equal(alone, probability.mean(1).topk(7, -1).indices.sort(-1).values)
    assert torch.equal(together, probability.mean((1, 2))[:, None].topk(7, -1).indices.sort(-1).values)


def test_rows_read_are_the_centroids_and_each_list_of_a_group_once() -> None:
    tabled = tabled_layer()
    layer, tables = tabled.layer, tabled.tables
    nearest = look_up(tables, layer.queries.flatten(1, 2)).nearest[..., 0].unflatten(2, (2, 8))
    plain, selection = (
        CSAttention(rerank=rerank).prepare(layer.context).select(as_queries(layer.queries), Budget(7))
        for rerank in (1.0, 2.5)
    )
    assert isinstance(plain.cost.index_rows, torch.Tensor)
    assert isinstance(selection.cost.index_rows, torch.Tensor)
    # Keys alone, a row each, of what is read for its exact logits and not attended.
    assert torch.equal(selection.cost.index_rows - plain.cost.index_rows, torch.full((2, 8), 18.0 - 7))
    for head in range(2):
        for query in range(8):
            lists = {(part, int(nearest[head, part, group, query])) for part in range(4) for group in range(2)}
            read = 4 * 6 * 4 * 2 + len(lists) * tables.tokens.shape[-1] * 6
            assert float(plain.cost.index_rows[head, query]) == pytest.approx(read / (16 * 4))


@properties
@given(seed=st.integers(0, 10**6), shared=st.booleans(), budget=st.integers(1, 20))
def test_of_the_best_by_the_tables_those_of_highest_exact_probability_are_attended(
    seed: int, shared: bool, budget: int
) -> None:
    layer, beside = tabled_layer(seed).layer, normal(seed, 2, 2, 8)
    ask = as_queries(layer.queries, beside, joint=shared)
    candidates = CSAttention(rerank=1.0).prepare(layer.context).select(ask, Budget(3 * budget)).rows.starts
    chosen = CSAttention(rerank=3.0).prepare(layer.context).select(ask, Budget(budget)).rows.starts
    # Of one head alone the order is that of its logits; the estimated denominators weigh the heads of a group.
    logits = torch.einsum("hgqd,hmd->hgqm", layer.queries.double(), layer.context.keys.double())
    for head in range(2):
        for query in range(chosen.shape[1]):
            tokens, among = chosen[head, query], candidates[head, query]
            assert set(tokens.tolist()) <= set(among.tolist())
            left = [token for token in among.tolist() if token not in tokens.tolist()]
            asking = logits[head, :, query] if not shared else logits[head].flatten(0, 1)
            # No token that every query likes better than a chosen one is left.
            for token in left:
                assert not bool((asking[:, [token]] > asking[:, tokens] + 1e-4).all(0).any())


def test_backed_off_lookups_read_two_lists_as_calibrated() -> None:
    tabled = tabled_layer(queries=32)
    layer = tabled.layer
    half = layer.queries[:, :, :16]
    best = cosines(tabled.tables, half.flatten(1, 2)).amax(-1)
    for share in (0.25, 1.0):
        selector = CSAttention(backoff=share).prepare(layer.context)
        assert selector.backoff is not None
        assert float((best < selector.backoff).double().mean()) == pytest.approx(share, abs=0.02)
    assert CSAttention().prepare(layer.context).backoff is None
    read = [
        CSAttention(backoff=share).prepare(layer.context).select(as_queries(half), Budget(5)).cost.index_rows
        for share in (0.0, 0.5, 1.0)
    ]
    sums = [float(torch.as_tensor(rows).sum()) for rows in read]
    assert sums[0] < sums[1] < sums[2]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_second_list_covers_tokens_only_where_it_is_read(share: float) -> None:
    tabled = tabled_layer()
    (layer, tables), (Hk, G, Q, _) = (tabled.layer, tabled.tables), tabled.layer.queries.shape
    selector = CSAttention(backoff=share).prepare(layer.context)
    best = cosines(tables, layer.queries.flatten(1, 2)).topk(2, -1)
    named = torch.zeros(Hk, Q, tables.keys, dtype=torch.bool)
    for head, part, group, query in torch.cartesian_prod(*(torch.arange(size) for size in (Hk, 4, G, Q))):
        row = group * Q + query
        lists = 1 if selector.backoff is None or best.values[head, part, row, 0] >= selector.backoff else 2
        for nearest in best.indices[head, part, row, :lists]:
            named[head, query, tables.tokens[head, part, nearest].long() - tables.first_token] = True
    assert torch.equal(selector.covered(as_queries(layer.queries)), named)


@pytest.mark.parametrize("step", [1, 2, 3, 8, 20])
def test_between_searches_the_same_tokens_stay_chosen(step: int) -> None:
    layer = tabled_layer().layer
    every = CSAttention().prepare(layer.context).select(as_queries(layer.queries), Budget(6))
    stepped = CSAttention(step=step).prepare(layer.context)
    at_once = CSAttention(step=step).prepare(layer.context).select(as_queries(layer.queries), Budget(6))
    assert isinstance(every.cost.index_rows, torch.Tensor)
    for query in range(8):
        one = stepped.select(as_queries(layer.queries[:, :, query : query + 1]), Budget(6))
        searched = query // step * step
        expected_rows = every.cost.index_rows[:, query] if query == searched else torch.zeros(2)
        for starts, rows in (
            (one.rows.starts[:, 0], one.cost.index_rows),
            (at_once.rows.starts[:, query], at_once.cost.index_rows),
        ):
            assert torch.equal(starts, every.rows.starts[:, searched])
            rows = torch.as_tensor(rows).expand(2, -1) if torch.as_tensor(rows).ndim else torch.zeros(2, 1)
            assert_close(rows[:, min(query, rows.shape[1] - 1)], expected_rows, 1e-6)


@pytest.mark.parametrize("share", [0.1, 0.5], ids=["few", "many"])
@pytest.mark.parametrize("rerank", [1.0, 2.0])
def test_queries_that_share_what_they_read_count_the_centroids_and_each_reranked_key_once(
    rerank: float, share: float
) -> None:
    layer = tabled_layer().layer
    selector = CSAttention(rerank=rerank).prepare(layer.context)
    tokens = round(share * layer.split.middle)
    of_one = selector.select(as_queries(layer.queries[:, :, :1]), Budget(tokens))
    of_five = selector.select(as_queries(layer.queries[:, :, :1].expand(-1, -1, 5, -1)), Budget(tokens))
    centroids = 2 * selector.tables.centroids[0].numel() / selector.row_bytes
    more = (rerank - 1) * tokens
    lists = torch.as_tensor(of_one.cost.index_rows) - centroids - more
    read = unite(of_five, selector, layer.split.middle).cost.index_rows
    assert_close(torch.as_tensor(read), centroids + 5 * lists + min(5 * more, layer.split.middle), 1e-6)


def test_a_rewound_layer_and_another_budget_search_anew() -> None:
    layer = tabled_layer().layer
    selector = CSAttention(step=100).prepare(layer.context)
    first, second = (as_queries(layer.queries[:, :, query : query + 1]) for query in (0, 5))
    chosen = selector.select(first, Budget(6)).rows.starts
    assert torch.equal(selector.select(second, Budget(6)).rows.starts, chosen)
    fresh = CSAttention().prepare(layer.context)
    assert torch.equal(selector.select(second, Budget(7)).rows.starts, fresh.select(second, Budget(7)).rows.starts)
    assert torch.equal(selector.select(second, Budget(6)).rows.starts, chosen)
    assert selector.remove_appended() is None
    assert selector.conversation is not None
    selector.conversation.forget()
    anew = selector.select(second, Budget(6)).rows.starts
    assert torch.equal(anew, fresh.select(second, Budget(6)).rows.starts)
    assert not torch.equal(anew, chosen)


def test_a_raised_budgets_selection_is_no_older_than_the_first_budgets() -> None:
    """As a guard asks: for the first budget in each step, and for a raised one in the first and the last step."""
    layer = tabled_layer().layer
    selector, fresh = CSAttention(step=2).prepare(layer.context), CSAttention().prepare(layer.context)
    steps = [as_queries(layer.queries[:, :, query : query + 1]) for query in range(5)]
    for number, step in enumerate(steps):
        selector.select(step, Budget(6))
        raised = selector.select(step, Budget(12)) if number in (0, 4) else None
    assert raised is not None
    assert torch.equal(raised.rows.starts, fresh.select(steps[4], Budget(12)).rows.starts)


@pytest.fixture(
    scope="module",
    params=["llama", "gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi3", "smollm3"))],
)
def tabled_index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """A small index of a family: whole rotation, windows with a soft cap, half a rotation, layers without any."""
    folder = tmp_path_factory.mktemp(request.param) / "small.skv"
    indexer = CSAttentionIndexer(subspace_size=4, centroids=8, iterations=3, query_sample=128)
    return build_small(folder, request.param, methods={"csattention": indexer})


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("stream", "step"), [(False, 1), (True, 1), (True, 100)], ids=["exact", "streamed", "streamed between searches"]
)
def test_a_budget_of_everything_gives_the_plain_models_logits(tabled_index: OpenIndex, stream: bool, step: int) -> None:
    tokens = random_ids(40)
    cache = tabled_index.cache(sparse("csattention", CSAttention(stream=stream, buffer=8, step=step), Budget(1.0)))
    logits = stepped_logits(tabled_index, cache, tokens, question=20)
    plain = plain_logits(tabled_index.model, torch.cat([tabled_index.input_ids, tokens]))[-40:]
    assert_close(logits, plain, 1e-4)
    grown = {layer.plan.middle.used for layer in cache.stored_layers if isinstance(layer, SparseLayer)}
    waiting = 16 + len(tokens)
    assert grown == {tabled_index.split.middle + (waiting // 8 - 1) * 8 * stream}


def test_no_residual_where_tokens_join_that_no_cluster_has(tabled_index: OpenIndex) -> None:
    with pytest.raises(UsageError, match="--residual: with --stream, csattention adds generated tokens"):
        tabled_index.cache(sparse("csattention", CSAttention(stream=True), Budget(0.1), residual=True))


@pytest.mark.thinned
@pytest.mark.parametrize("method", [CSAttention(stream=True, buffer=8), CSAttention(step=4)], ids=["stream", "step"])
def test_a_second_question_is_answered_as_by_a_fresh_cache(tabled_index: OpenIndex, method: CSAttention) -> None:
    used, fresh = (tabled_index.cache(sparse("csattention", method, Budget(0.1))) for _ in range(2))
    first, second = random_ids(30, seed=1), random_ids(26, seed=2)
    stepped_logits(tabled_index, used, first, question=10)
    again, anew = (stepped_logits(tabled_index, cache, second, question=10) for cache in (used, fresh))
    assert torch.equal(again, anew)
    assert used.kv_fraction() == fresh.kv_fraction()


def test_every_form_is_reported(tabled_index: OpenIndex) -> None:
    report = recall_report(
        tabled_index.artifact, ["csattention"], [Budget(0.1), Budget(1.0)], MeasuredQueries(tabled_index.artifact)
    )
    rows = {(row.variant, row.budget): row for row in report.by()}
    assert {variant for variant, _ in rows} == {"reranked", *SCORINGS, "mean fitted"}
    assert all(row.recall == 1 and row.output_error < 1e-4 for (_, budget), row in rows.items() if budget == 1.0)
    assert rows["reranked", 0.1].recall > rows["mean", 0.1].recall > 0.2


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("csattention_scoring", "best", "--csattention-scoring best: choose one of mean, floor, paper"),
        ("rerank", 0.5, "--rerank 0.5: give at least 1"),
        ("csattention_weights", "odd", "--csattention-weights odd: choose one of uniform, fitted"),
        ("backoff", 1.5, "--backoff 1.5"),
        ("step", 0, "--step 0"),
        ("buffer", 0, "--buffer 0"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_their_flags(option: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        CSAttention(**{option: value})


def test_an_index_of_an_earlier_context_is_found_by_positions_in_the_prompt(tmp_path: Path) -> None:
    """Tables name positions in the prompt, and rows are counted from the first middle token."""
    index = build_small(tmp_path / "a.skv", methods={"csattention": replace(SMALL, query_sample=32)})
    tokens = index.artifact.method_tensors("csattention", 0)["table_tokens"]
    split = index.split
    assert split.sinks <= int(tokens.min())
    assert int(tokens.max()) < split.sinks + split.middle
