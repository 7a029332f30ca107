"""The choice of codes: best clusters, best codes in these, best keys of these; and what stands for all other tokens."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choices import assert_best
from support.estimates import double_logits
from support.random_tensors import normal
from support.reference import assert_close
from support.small_layer import SINKS, TAIL, SmallLayer, all_chosen, as_queries, small_layer

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import Split
from sparsekv.indexing.indexers.interface import LayerInput
from sparsekv.indexing.indexers.product_codes import key_turn
from sparsekv.indexing.methods.codes import CodesIndexer
from sparsekv.runtime.methods.codes import CodeEstimates, Codes
from sparsekv.runtime.selection.interface import Budget, MiddleContext

properties = settings(max_examples=10)
choices = pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])


def _built(layer: SmallLayer, **options: object) -> MiddleContext:
    """The layer as the method sees it; positions are counted from the middle's first token."""
    keys, facts = layer.context.keys, layer.context.facts
    split = Split(sinks=SINKS, middle=keys.shape[1], tail=TAIL)
    indexer = CodesIndexer(levels=(0.1,), iterations=3, **{"code_bytes": 4} | options)  # type: ignore[arg-type]
    queries = normal(17, layer.queries.shape[0] * layer.queries.shape[1], 24, keys.shape[2])
    values = layer.context.load_values()
    tensors = indexer.build_layer(LayerInput(keys, values, facts, split, queries))
    tensors["token_order"] = tensors["token_order"] - SINKS
    return replace(layer.context, tensors=tensors)


@cache
def _layer(seed: int) -> tuple[SmallLayer, MiddleContext]:
    """A layer of 300 tokens; building one takes a second."""
    layer = small_layer(seed, middle=300)
    return layer, _built(layer)


def _decoded(context: MiddleContext) -> torch.Tensor:
    """[Hk, M, D] float64: the keys that the codes stand for, turned back."""
    codes, books = context.tensors["codes"], context.tensors["codebooks"].double()
    heads = [
        torch.stack([torch.cat([book[part, code] for part, code in enumerate(key)]) for key in of_head.tolist()])
        for of_head, book in zip(codes, books, strict=True)
    ]
    return torch.stack(heads) @ context.tensors["query_turn"].double().transpose(1, 2)


def _beside(layer: SmallLayer, context: MiddleContext, exact: torch.Tensor) -> torch.Tensor:
    """[Hk, G, Q] float64: the log-sum-exp of the exact rows and of what the clusters weigh."""
    counts, bias = context.tensors["level0.counts"].double(), context.tensors["rest_bias"].double()
    logits = double_logits(layer.queries, context.tensors["level0.centroids"], context.facts)
    masses = (logits + (counts.log() + bias)[:, None, None]).logsumexp(-1)
    return torch.logaddexp(masses, exact.double())


def _scores(logits: torch.Tensor, beside: torch.Tensor, *, shared: bool) -> torch.Tensor:
    probability = (logits.double() - beside[..., None]).exp().mean(1)
    return probability.mean(1, keepdim=True) if shared else probability


@properties
@given(seed=st.integers(0, 10**6), middle=st.integers(5, 40), softcap=st.sampled_from([None, 2.0]))
def test_estimates_are_the_products_with_decoded_keys(seed: int, middle: int, softcap: float | None) -> None:
    layer = small_layer(seed, middle=middle, softcap=softcap)
    context = _built(layer)
    everything = torch.arange(middle).expand(len(layer.queries), 1, -1)
    estimates = CodeEstimates(context.tensors, context.facts).of(layer.queries, everything)
    assert_close(estimates, double_logits(layer.queries, _decoded(context), context.facts), 1e-4)


def test_keys_are_turned_back_by_what_queries_are_turned_by() -> None:
    context = _built(small_layer(middle=300), code_bytes=16)
    assert_close(_decoded(context), context.keys.double(), 0.05)
    turn = context.tensors["query_turn"]
    assert_close(
        turn.double() @ key_turn(turn).double().transpose(1, 2), torch.eye(16).double().expand(2, -1, -1), 1e-5
    )


@choices
@properties
@given(seed=st.integers(0, 2), budget=st.integers(1, 320))
def test_with_everything_read_the_most_probable_are_chosen(shared: bool, seed: int, budget: int) -> None:
    (layer, context), exact = _layer(seed), normal(seed, 2, 3, TAIL)
    selector = Codes(scan=1.0, rerank=1e3).prepare(context)
    chosen = all_chosen(selector.select(as_queries(layer.queries, exact, joint=shared), Budget(budget)), selector)
    truth = double_logits(layer.queries, context.keys, context.facts)
    totals = torch.maximum(_beside(layer, context, exact), truth.logsumexp(-1))
    assert_best(chosen, _scores(truth, totals, shared=shared), min(budget, 300))


@choices
@properties
@given(seed=st.integers(0, 2), budget=st.integers(1, 60))
def test_codes_of_the_best_clusters_are_ranked(shared: bool, seed: int, budget: int) -> None:
    (layer, context), exact = _layer(seed), normal(seed, 2, 3, TAIL)
    selector = Codes(scan=0.3, rerank=1.0).prepare(context)
    chosen = all_chosen(selector.select(as_queries(layer.queries, exact, joint=shared), Budget(budget)), selector)
    beside = _beside(layer, context, exact)
    of_clusters = _scores(
        double_logits(layer.queries, context.tensors["level0.centroids"], context.facts), beside, shared=shared
    )
    estimated = _scores(double_logits(layer.queries, _decoded(context), context.facts), beside, shared=shared)
    assert_best(chosen, estimated.masked_fill(~_scanned(context, of_clusters, 90), -1), budget)


def _scanned(context: MiddleContext, scores: torch.Tensor, wanted: int) -> torch.Tensor:
    """[Hk, Q, M] bool: the first tokens of the clusters by score, as many as are wanted."""
    seen = torch.zeros(*scores.shape[:2], context.keys.shape[1], dtype=torch.bool)
    for head, of_head in enumerate(scores):
        ends, order = context.tensors["token_offsets"][head].tolist(), context.tensors["token_order"][head].long()
        for query, of_query in enumerate(of_head):
            clusters = of_query.argsort(descending=True).tolist()
            tokens = torch.cat([order[ends[one] : ends[one + 1]] for one in clusters])
            seen[head, query, tokens[:wanted]] = True
    return seen


@choices
def test_centroids_stand_for_every_token_that_is_not_chosen(shared: bool) -> None:
    layer, context = _layer(0)
    for method in (Codes(), Codes(replace=False)):
        selection = method.prepare(context).select(as_queries(layer.queries, joint=shared), Budget(20))
        assert selection.rest is not None
        (part,) = selection.rest.segments()
        left = (part.log_counts - context.tensors["rest_bias"][:, None]).exp()
        assert_close(left.sum(-1), torch.full(left.shape[:2], 280.0), 1e-5)
        assert bool(((left - left.round()).abs() < 1e-3).all())
        assert len(selection.attended_segments()) == method.replace


def test_a_residual_is_its_own() -> None:
    layer, context = _layer(0)
    own = Codes().prepare(context).select(as_queries(layer.queries), Budget(20))
    selector = Codes(replace=False).prepare(context)
    assert selector.replace_by_own()
    turned_on = selector.select(as_queries(layer.queries), Budget(20))
    assert turned_on.cost == own.cost
    assert torch.equal(turned_on.attended_segments()[0].log_counts, own.attended_segments()[0].log_counts)


def test_a_logit_far_above_what_the_clusters_weigh_is_still_a_number() -> None:
    layer, context = _layer(0)
    loud = replace(context, load_keys=lambda: 500 * context.keys)
    chosen = Codes(scan=1.0, rerank=1e3).prepare(loud).select(as_queries(layer.queries), Budget(5))
    assert chosen.rows.starts.shape[-1] == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clusters_codes_codebooks_and_keys_that_are_looked_at_again_are_read(dtype: torch.dtype) -> None:
    layer, context = _layer(0)
    rows = {name: context.tensors[name].to(dtype) for name in ("level0.centroids", "level0.value_centroids")}
    stored = replace(context, load_keys=lambda: context.keys.to(dtype), tensors=context.tensors | rows)
    selector = Codes(scan=0.5, rerank=1.5).prepare(stored)
    selection = selector.select(as_queries(layer.queries.to(dtype)), Budget(30))
    # 150 codes of 4 bytes, 256 centroids and 16 directions of 16 channels in float16, over a row; 30 clusters, twice.
    row = 16 * (4 if dtype == torch.float32 else 2)
    assert selection.cost.index_rows == pytest.approx((150 * 4 + 272 * 16 * 2) / row + 60 + 15)
    assert int(selection.rows.lengths.sum(-1).min()) == int(selection.rows.lengths.sum(-1).max()) == 30


@pytest.mark.parametrize("scan", [0.5, 1.0])
def test_keys_are_read_only_to_be_looked_at_again(scan: float) -> None:
    layer, context = _layer(0)
    without = replace(context, load_keys=lambda: pytest.fail("the keys were read"))
    chosen = Codes(scan=scan).prepare(without).select(as_queries(layer.queries), Budget(30))
    expected = Codes(scan=scan).prepare(context).select(as_queries(layer.queries), Budget(30))
    assert torch.equal(chosen.rows.starts, expected.rows.starts)


@pytest.mark.parametrize("rerank", [0.9, float("inf"), float("nan")])
def test_fewer_keys_than_the_budget_are_refused(rerank: float) -> None:
    with pytest.raises(UsageError, match=f"--rerank {rerank:g}: give at least 1"):
        Codes(rerank=rerank)


@pytest.mark.parametrize("scan", [0.0, -1.0, 1.5, float("nan")])
def test_a_scan_that_is_no_share_is_refused(scan: float) -> None:
    with pytest.raises(UsageError, match=f"--scan {scan:g}: give a share above 0 and at most 1"):
        Codes(scan=scan)


def test_the_compiled_step_is_loaded_before_the_first_query() -> None:
    """So that no decode step waits for it; a scan of some clusters does not use it."""
    _, context = _layer(0)
    assert "compiled" in vars(Codes().prepare(context).step_codes)
    assert "step_codes" not in vars(Codes(scan=0.5).prepare(context))


def test_clusters_are_described() -> None:
    layer, context = _layer(0)
    found = Codes.describe_clusters(context, layer.context.load_values(), 2)
    (level,) = found.levels
    assert level.clusters == 60
    assert level.value_spread is not None
    assert found.counts.sum(-1).tolist() == [300, 300]


@pytest.mark.parametrize(
    ("middle", "budget"),
    [
        (1, Budget(0.05)),
        (9_600, Budget(0.05)),
        (9_700, Budget(480)),
        (31_900, Budget(480)),
        (32_000, Budget(0.015)),
        (500_000, Budget(0.015)),
    ],
)
def test_the_default_budget_follows_the_documents_length(middle: int, budget: Budget) -> None:
    assert Codes.default_budget(middle) == budget


@given(middle=st.integers(1, 100_000))
def test_a_longer_document_has_no_smaller_default_budget(middle: int) -> None:
    of_both = [Codes.default_budget(tokens).tokens(tokens) for tokens in (middle, middle + 1)]
    assert of_both == sorted(of_both)
