"""TidalDecode and LessIsMore: which layers choose, by what, and that the layers after them take the same."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.causal_families import tiny_config, tiny_model
from support.choices import assert_best, recorded_choices
from support.configs import sparse
from support.random_tensors import normal
from support.reference import assert_close, attention_probabilities
from support.small_index import build_small, random_ids, stepped_logits
from support.small_layer import SmallLayer, all_chosen, as_queries, small_layer
from support.tiny_models import build_tiny, tiny_tokenizer
from transformers import LlamaConfig

from sparsekv.formats.errors import UsageError
from sparsekv.formats.models.load import LoadedModel
from sparsekv.runtime.attention.config import QuestionPrefill
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.lessismore import LessIsMore
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.tidaldecode import TidalDecode
from sparsekv.runtime.reporting.recall import MeasuredQueries
from sparsekv.runtime.reporting.report import recall_report
from sparsekv.runtime.selection.interface import Budget, LayerPosition, Queries, Selector
from sparsekv.runtime.selection.token_choice import LayerSharing

properties = settings(max_examples=15)
every_method = pytest.mark.parametrize("method", [TidalDecode(), LessIsMore()], ids=["tidaldecode", "lessismore"])
Chosen = list[list[list[int]]]


def _at(layer: SmallLayer, method: LayerSharing, number: int, layers: int, shared: dict[str, Any]) -> Selector:
    return method.prepare(replace(layer.context, position=LayerPosition(number, layers, shared)))


def _choose(selector: Selector, one: Queries, budget: int) -> Chosen:
    return all_chosen(selector.select(one, Budget(budget)), selector)


def _probability(layer: SmallLayer, query: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """[Hk, G, Q, M] float64: softmax over the middle and what else is attended."""
    keys = layer.context.keys.double()
    logits = torch.einsum("hgqd,hmd->hgqm", query.double(), keys) * layer.context.facts.softmax_scale
    return logits.exp() / (logits.exp().sum(-1) + exact.double().exp())[..., None]


@every_method
@pytest.mark.parametrize(
    ("layers", "select", "full"),
    [
        (1, 0, [0]),
        (3, 0, [0, 1, 2]),
        (6, 0, [0, 1, 2]),
        (8, 0, [0, 1, 2, 3]),
        (32, 0, [0, 1, 2, 13]),
        (6, 4, [0, 1, 2, 4]),
    ],
)
def test_the_first_layers_and_those_that_choose_attend_to_everything(
    method: LayerSharing, layers: int, select: int, full: list[int]
) -> None:
    layer, shared = small_layer(middle=30), dict[str, Any]()
    for one in (as_queries(layer.queries), as_queries(layer.queries, joint=True)):
        for number in range(layers):
            selector = _at(layer, replace(method, select_layer=select), number, layers, shared)
            selection = selector.select(one, Budget(4))
            wanted = 30 if number in full else 4
            assert selection.rows.lengths.sum(-1).unique().tolist() == [wanted]
            assert selection.cost.index_rows == 0
            assert selection.rows.starts.shape[:2] == (2, 1 if one.joint else 32)


@properties
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 70), shared=st.booleans())
def test_tidaldecode_takes_what_the_layer_before_attends_to_most(seed: int, budget: int, shared: bool) -> None:
    """Whatever the layer's own keys and queries are."""
    layer, later, shared = small_layer(seed, middle=60), small_layer(seed + 1, middle=60), dict[str, Any]()
    exact = 2 * normal(seed, *layer.queries.shape[:3])
    _at(layer, TidalDecode(), 2, 6, shared).select(as_queries(layer.queries, exact, joint=shared), Budget(1))
    probability = _probability(layer, layer.queries, exact).mean(1)
    probability = probability.mean(1, keepdim=True) if shared else probability
    for number in (3, 5):
        chosen = _choose(_at(later, TidalDecode(), number, 6, shared), as_queries(later.queries, joint=shared), budget)
        assert_best(chosen, probability, min(budget, 60))


@every_method
def test_each_batch_and_each_choice_replaces_no_other_but_its_own(method: LayerSharing) -> None:
    layer, shared = small_layer(middle=50), dict[str, Any]()
    selecting, taking = (_at(layer, method, number, 6, shared) for number in (2, 3))
    parts = [replace(as_queries(layer.queries[:, :, start : start + 8]), batch=start // 8) for start in (0, 8)]
    for part in parts:
        selecting.select(part, Budget(9))
    first = [_choose(taking, part, 9) for part in parts]
    assert first[0] != first[1]
    selecting.select(replace(parts[0], batch=1), Budget(9))
    assert [_choose(taking, part, 9) for part in parts] == [first[0], first[0]]


@every_method
def test_a_layer_that_finds_no_choice_makes_its_own_and_reads_all_keys(method: LayerSharing) -> None:
    layer = small_layer(middle=50)
    alone = _at(layer, method, 4, 6, {})
    selection = alone.select(as_queries(layer.queries), Budget(9))
    assert selection.cost.index_rows == 50
    shared = dict[str, Any]()
    _at(layer, method, 2, 6, shared).select(as_queries(layer.queries), Budget(9))
    assert all_chosen(selection, alone) == _choose(_at(layer, method, 3, 6, shared), as_queries(layer.queries), 9)


def _dealt(rankings: list[list[int]], tokens: int, share: float) -> set[int]:
    """The recent tokens, and others from the heads' rankings, one of each head at a time."""
    middle, old = len(rankings[0]), max(int(share < 1), int(tokens * (1 - Fraction(str(share)))))
    recent = set(range(middle - (tokens - old), middle))
    dealt = dict.fromkeys(ranking[rank] for rank in range(middle) for ranking in rankings)
    return recent | set([token for token in dealt if token not in recent][:old])


@properties
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 40), share=st.sampled_from([0.0, 0.25, 0.8, 1.0]))
@example(seed=0, budget=10, share=0.8)
def test_lessismore_deals_out_the_heads_rankings_beside_the_recent_tokens(seed: int, budget: int, share: float) -> None:
    """With one channel a token, a query is its own list of logits, and their order is exact."""
    layer, middle = small_layer(middle=30), 30
    generator = torch.Generator().manual_seed(seed)
    orders = torch.stack([torch.randperm(middle, generator=generator) for _ in range(6)]).view(2, 3, 1, middle)
    query = torch.zeros(2, 3, 1, middle).scatter_(-1, orders, torch.arange(middle, 0, -1.0).expand(2, 3, 1, -1))
    channels = replace(layer, context=replace(layer.context, load_keys=lambda: torch.eye(middle).expand(2, -1, -1)))
    method, shared = LessIsMore(recent_share=share), dict[str, Any]()
    _at(channels, method, 2, 6, shared).select(as_queries(query), Budget(1))
    (of_first,), (of_second,) = _choose(_at(layer, method, 3, 6, shared), as_queries(query), budget)
    assert of_first == of_second
    assert len(of_first) == min(budget, middle)
    assert set(of_first) == _dealt(orders.view(6, middle).tolist(), min(budget, middle), share)


def test_a_questions_queries_weigh_by_what_they_attend_to_of_the_middle() -> None:
    layer, shared = small_layer(middle=50, G=1), dict[str, Any]()
    pair = layer.queries[:, :, :2]
    exact = torch.tensor([0.0, 60.0]).expand(2, 1, 2)
    alone = dict[str, Any]()
    _at(layer, LessIsMore(), 2, 6, shared).select(as_queries(pair, exact, joint=True), Budget(1))
    _at(layer, LessIsMore(), 2, 6, alone).select(as_queries(pair[:, :, :1]), Budget(1))
    both, first = (
        _choose(_at(layer, LessIsMore(), 3, 6, where), one, 10)
        for where, one in ((shared, as_queries(pair, joint=True)), (alone, as_queries(pair[:, :, :1])))
    )
    assert both == first


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """Seven layers, so that some of them choose for others."""
    model = build_tiny(LlamaConfig, num_hidden_layers=7)()
    loaded = LoadedModel(model, tiny_tokenizer(), "tiny-deep", None)
    return build_small(tmp_path_factory.mktemp("deep") / "small.skv", loaded=loaded)


def test_each_step_of_an_answer_takes_what_that_step_chose_below(deep: OpenIndex) -> None:
    cache = deep.cache(sparse("tidaldecode", TidalDecode(select_layer=5), Budget(20)))
    with recorded_choices(cache) as layers:
        stepped_logits(deep, cache, random_ids(13), question=9)
    split, facts = deep.split, deep.artifact.manifest.layers[0]
    for chooser, takers in ((2, (3, 4)), (5, (6,))):
        keys = deep.artifact.context(chooser)[0][:, split.sinks : split.sinks + split.middle]
        for step, choice in enumerate(layers[chooser]):
            logits = torch.einsum("hgqd,hmd->hgqm", choice.queries.query.double(), keys.double()) * facts.softmax_scale
            total = torch.logaddexp(logits.logsumexp(-1), choice.exact_logsumexp.double())
            probability = (logits - total[..., None]).exp().mean((1, 2))[:, None]
            for taker in takers:
                assert_best(layers[taker][step].tokens, probability, 20)
    assert len({str(choice.tokens) for choice in layers[3]}) > 1
    assert layers[4][1].tokens != layers[6][1].tokens


@every_method
def test_each_piece_of_a_question_takes_what_is_ranked_for_it(method: LayerSharing, deep: OpenIndex) -> None:
    """All pieces go through a layer before the next one: what the last one is does not reach the first one."""
    name = "tidaldecode" if isinstance(method, TidalDecode) else "lessismore"
    question = QuestionPrefill(name, method, Budget(12), chunk_size=8)
    tokens = random_ids(18)
    other = torch.cat([tokens[:8], (tokens[8:] + 1) % 100])
    logits = []
    for one in (tokens, other):
        cache = deep.cache(sparse("quest", Quest(page_size=8), Budget(12), question=question))
        logits.append(stepped_logits(deep, cache, one, question=16)[:8])
    assert_close(logits[0], logits[1], 1e-6)
    layers = (layer for layer in cache.stored_layers if isinstance(layer, SparseLayer))
    shared = {id(one): one for layer in layers for one in [layer.plan.prefill.search.selector.rankings]}  # type: ignore[attr-defined]
    assert [len(rankings) for rankings in shared.values()] == [0]


@pytest.mark.parametrize("at_once", [None, 5], ids=["at once", "in pieces"])
def test_a_report_follows_the_layers(deep: OpenIndex, at_once: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recall of a taking layer is the overlap of its best tokens with those of the layer that chose."""
    split, heads, tokens = deep.split, 4, 30
    if at_once is not None:
        monkeypatch.setattr("sparsekv.runtime.reporting.recall.LOGITS_AT_ONCE", at_once * heads * split.tokens)
    report = recall_report(deep.artifact, ["tidaldecode"], [Budget(10), Budget(tokens)], MeasuredQueries(deep.artifact))
    rows = {(row.layer, row.kv_head): row for row in report.rows if row.budget_tokens == tokens}
    first = split.tokens - split.tail + split.tail // 2
    best = {}
    for layer, facts in enumerate(deep.artifact.manifest.layers):
        keys = deep.artifact.context(layer)[0]
        queries = deep.artifact.queries(layer)["tail"][:, split.tail // 2 :].unflatten(0, (2, -1))
        mask = torch.arange(split.tokens) <= torch.arange(first, split.tokens)[:, None]
        dense = attention_probabilities(queries, keys, facts.softmax_scale, mask=mask).mean(1)
        best[layer] = dense[..., split.sinks : split.sinks + split.middle].topk(tokens, -1).indices.tolist()
    # 13 layers in 32 are 3 in 7, rounded.
    full, chooser = 4, [0, 1, 2, 3, 3, 3, 3]
    for (layer, head), row in rows.items():
        assert layer is not None
        pairs = zip(best[layer][head], best[chooser[layer]][head], strict=True)
        overlap = [1.0 if layer < full else len(set(own) & set(others)) / tokens for own, others in pairs]
        assert row.recall == pytest.approx(sum(overlap) / len(overlap), abs=1e-6)
        assert row.kv_fraction == pytest.approx(1.0 if layer < full else tokens / split.middle)
        assert row.output_error < 1e-5 if layer < full else row.output_error > 1e-3


def test_a_report_follows_layers_that_differ_in_query_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = [4, 4, 4, 8, 4, 8]
    kinds = {"layer_types": ["full_attention"] * len(heads), "mlp_layer_types": ["dense"] * len(heads)}
    shape = {"num_hidden_layers": len(heads), "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny_model(tiny_config("laguna", **shape, num_attention_heads_per_layer=heads, **kinds))
    index = build_small(tmp_path / "a.skv", loaded=LoadedModel(model, tiny_tokenizer(), "tiny", None), methods={})
    recall = []
    for at_once in (100, 2):
        monkeypatch.setattr("sparsekv.runtime.reporting.recall.LOGITS_AT_ONCE", at_once * 4 * index.split.tokens)
        queries = MeasuredQueries(index.artifact)
        report = recall_report(index.artifact, ["tidaldecode", "lessismore"], [Budget(30)], queries)
        recall.append([row.recall for row in report.rows])
    assert recall[0] == pytest.approx(recall[1])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"select_layer": 1}, "--select-layer 1: the first 2 layers attend to all tokens, .*; give 3 or more"),
        ({"select_layer": -3}, "--select-layer -3"),
        ({"recent_share": 1.5}, "--recent-share 1.5: give a share from 0 to 1"),
    ],
)
def test_layers_and_shares_that_cannot_be_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LessIsMore(**parameters)


@every_method
def test_a_layer_that_the_index_does_not_have_is_refused(method: LayerSharing, deep: OpenIndex) -> None:
    name = type(method).__name__.lower()
    with pytest.raises(UsageError, match="--select-layer 7: the index has 7 layers, counted from 0"):
        deep.cache(sparse(name, replace(method, select_layer=7), Budget(9)))
