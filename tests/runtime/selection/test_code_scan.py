"""A step's choice by kernels that read all codes: the best tokens by the estimates of torch, but for those that the
kernels' ranks do not tell apart."""

import functools
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support import coded_layer as coded_layers
from support.kernel_runs import DEVICE
from support.near_best import NearBest, as_mask
from support.random_tensors import normal
from support.small_layer import SmallLayer, as_queries

from sparsekv.formats.index.context_rows import Pair
from sparsekv.kernels.codes.code_ranks import CodeChoice, best_by_codes, octaves_of_steps
from sparsekv.kernels.common.kernel_inputs import RowScales, RunRows, ScoredCentroids
from sparsekv.kernels.posting_lists.list_ranks import ExactKeys
from sparsekv.runtime.attention import executors
from sparsekv.runtime.attention.executors import GatherExecutor, InPlaceExecutor, Step
from sparsekv.runtime.cache.kv_store import MiddleRows, PlacedRows
from sparsekv.runtime.methods import codes as code_scan
from sparsekv.runtime.methods.codes import Codes, CodeScan, CodesSelector
from sparsekv.runtime.selection.interface import Budget, InPlace, MiddleContext, Queries
from sparsekv.runtime.selection.wrappers import residual_clusters

EXACT, SEEDS = 20, [3, 11, 12, 13, 14]
coded_layer = functools.cache(coded_layers.coded_layer)
BY_LOGITS = 1 + 3 / 16
"""A factor between scores above which ranks tell them apart. A rank is a sixteenth of the mantissas, and kernels may be
one off."""


def by_codes(context: MiddleContext, queries: Queries) -> float:
    """The same where ranks are fewer. One may be eight of the others, and the products of a code's parts are each half
    a step off."""
    codes = CodeScan(context.tensors, residual_clusters(context.tensors), context.facts).codes
    steps = octaves_of_steps(queries.query.flatten(1, 2), codes, context.facts.softmax_scale)
    return 1.01 * (1 + 8 / 16) * 2 ** (codes.books.shape[1] * float(steps.max()))


def by_kernels(monkeypatch: pytest.MonkeyPatch, method: Codes, context: MiddleContext) -> CodesSelector:
    """A selector that takes its kernels, or on a CPU what they are compared with."""
    for scan in (code_scan.CodeScan, code_scan.QuestionScan):
        monkeypatch.setattr(scan, "serves", staticmethod(lambda tensors: True))
    return method.prepare(context)


def one_step(layer: SmallLayer, dtype: torch.dtype = torch.float32) -> tuple[Queries, Queries]:
    """A decode step's query, for torch and for kernels."""
    query, exact = layer.queries[:, :, :1].to(DEVICE, dtype), normal(1, 2, EXACT, 16).to(DEVICE, dtype)
    beside = (query.double() @ exact.double().transpose(1, 2)[:, None] * 0.25).logsumexp(-1).float()
    plain = replace(as_queries(query), exact_logsumexp=lambda: beside)
    counter = torch.zeros(len(query), dtype=torch.int64, device=DEVICE)
    return plain, replace(plain, in_place=InPlace(counter, ExactKeys(exact)))


def estimates(context: MiddleContext, queries: Queries) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits [Hk, G, T, M] that codes stand for, of queries [Hk, G, T, D], and the log-sum-exps [Hk, G, T]
    that probabilities are relative to. Both follow the definition in float64."""
    tensors, facts = context.tensors, context.facts
    query, clusters = queries.query.double(), residual_clusters(tensors)
    heads, parts = torch.arange(len(query))[:, None, None], torch.arange(tensors["codes"].shape[2])
    keys = tensors["codebooks"].double()[heads, parts, tensors["codes"].long()].flatten(2)
    logits = query @ (keys @ tensors["query_turn"].double().transpose(1, 2)).transpose(1, 2)[:, None]
    weights = clusters.counts.double().log() + tensors["rest_bias"].double()
    masses = query @ clusters.keys.double().transpose(1, 2)[:, None] * facts.softmax_scale + weights[:, None, None]
    total = torch.logaddexp(masses.logsumexp(-1), queries.exact_logsumexp().double())
    return logits * facts.softmax_scale, total


def shares(logits: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Probabilities [Hk, T, M], mean over the group."""
    return (logits - total[..., None]).exp().mean(1)


@pytest.mark.thinned
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rerank", [1.0, 2.0])
def test_the_best_tokens_are_chosen(rerank: float, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By exact logits among candidates where these are read; their probabilities are relative to what the candidates
    weigh where that is more than was estimated."""
    layer, context = coded_layer(5000, seed=seed)
    _, in_place = one_step(layer)
    found = by_kernels(monkeypatch, Codes(rerank=rerank), context).select(in_place, Budget(300))
    logits, total = estimates(context, in_place)
    scores = shares(logits, total)
    best = NearBest.of_all(scores).best(scores, int(300 * rerank), by_codes(context, in_place))
    if rerank > 1:
        exact = in_place.query.double() @ context.keys.double().transpose(1, 2)[:, None] * context.facts.softmax_scale
        above = float((exact.logsumexp(-1) - total).clamp(min=0).max().exp())
        best = best.best(shares(exact, total), 300, BY_LOGITS * above)
    chosen = as_mask(found.rows.starts, 5000)
    assert chosen.sum(-1).tolist() == [[300], [300]]
    best.check(chosen)


@pytest.mark.parametrize("rerank", [1.0, 2.0])
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_the_choice_knows_the_rows_that_are_read_next(
    rerank: float, in_8_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel prefetches these rows, and the attention then prefetches the others; without the kernel it does
    not. A choice with re-ranking has no use for the rows."""
    layer, context = coded_layer(5000)
    keys, values = context.keys, context.keys.clone()
    rows = PlacedRows(keys, values, RowScales(keys, keys, keys, keys) if in_8_bits else None)
    given: list[tuple[torch.Tensor, torch.Tensor] | None] = []
    attended: list[ScoredCentroids] = []

    def choose(*arguments: Any) -> CodeChoice:
        given.append(arguments[6])
        return replace(best_by_codes(*arguments), ahead=arguments[6] is not None)

    def attend(query: torch.Tensor, runs: RunRows, exact: Pair, centroids: list[ScoredCentroids], *_: object,
               exact_count: None) -> torch.Tensor:  # fmt: skip
        attended.extend(centroids)
        return query

    monkeypatch.setattr(code_scan, "best_by_codes", choose)
    monkeypatch.setattr(executors, "decode_attention", attend)
    selector, counter = by_kernels(monkeypatch, Codes(rerank=rerank), context), torch.zeros(2, dtype=torch.int64)
    exact, query = normal(1, 2, EXACT, 16).to(DEVICE), layer.queries[:, :, :1].to(DEVICE)
    middle, gather = Mock(MiddleRows, in_place=lambda: rows), Mock(GatherExecutor)
    step = Step(query, exact, exact, None, 0, None, 0, False, (0.25, None, None))
    InPlaceExecutor(selector, middle, counter.to(DEVICE), gather).attend(step, Budget(300))
    assert [one is None for one in given] == ([] if rerank > 1 else [in_8_bits])
    assert all(one is None or (one[0] is keys and one[1] is values) for one in given)
    assert [one.ahead for one in attended] == [rerank == 1 and not in_8_bits]


@pytest.mark.parametrize("rerank", [1.0, 2.0])
@pytest.mark.parametrize("replaced", [True, False])
def test_cost_and_rest_are_those_of_torch(rerank: float, replaced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, context = coded_layer(5000)
    method, (plain, in_place) = Codes(rerank=rerank, replace=replaced), one_step(layer)
    expected = method.prepare(context).select(plain, Budget(300))
    found = by_kernels(monkeypatch, method, context).select(in_place, Budget(300))
    assert found.cost == expected.cost
    assert found.rest is not None
    assert (found.rest.in_place is not None) == replaced
    (left,) = found.rest.segments()
    scored = found.rest.in_place
    weights = (left.log_counts if scored is None else scored[0].log_weights()).exp().sum()
    assert float(weights) == pytest.approx(float(left.log_counts.exp().sum()), rel=1e-5)


def several(layer: SmallLayer, number: int, *, joint: bool) -> Queries:
    """So many queries, each with exact rows of its own."""
    query = layer.queries[:, :, :number].to(DEVICE)
    beside = 2 + 6 * normal(4, *query.shape[:3]).to(DEVICE)
    return replace(as_queries(query), exact_logsumexp=lambda: beside, joint=joint)


def each_alone(queries: Queries) -> list[Queries]:
    """Each query by itself, with its exact rows as a learned sink, to be chosen for in place."""
    query, beside = queries.query, queries.exact_logsumexp()
    nothing, counter = query.new_empty(len(query), 0, query.shape[3]), torch.zeros(len(query), dtype=torch.int64)
    exact = [ExactKeys(nothing, sinks=one) for one in beside.unbind(2)]
    return [
        replace(queries, query=query[:, :, [place]], in_place=InPlace(counter.to(DEVICE), of_query))
        for place, of_query in enumerate(exact)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_several_queries_share_what_each_chooses_by_itself(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has the best tokens of each. The rounding of a log-sum-exp may move a key to the next rank, and at the last
    chosen rank that swaps two keys, for each query once."""
    layer, context = coded_layer(5000, seed=seed)
    queries, counter = several(layer, 5, joint=False), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    selector = by_kernels(monkeypatch, Codes(), context)
    found = selector.choose_for_each(queries, Budget(300), counter)
    assert found is not None
    assert found.rows.indices is not None
    used = found.rows.indices.used
    assert torch.equal(counter, used.long())
    together = torch.zeros(2, 5000, dtype=torch.bool, device=DEVICE)
    for head, number in enumerate(used.tolist()):
        rows = found.rows.indices.rows[head, :number]
        assert bool((rows.diff() > 0).all())
        together[head, rows.long()] = True
    scores = shares(*estimates(context, queries))
    NearBest.of_all(scores).best(scores, 300, by_codes(context, queries)).any_query().check(together)
    alone = torch.cat([selector.select(query, Budget(300)).rows.starts for query in each_alone(queries)], 1)
    assert int((together != as_mask(alone, 5000).any(1)).sum()) <= 2 * 5 * 2


@pytest.mark.parametrize("replaced", [True, False])
def test_clusters_stand_for_what_none_of_several_queries_chose(replaced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, context = coded_layer(5000)
    counter = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    selector = by_kernels(monkeypatch, Codes(replace=replaced), context)
    found = selector.choose_for_each(several(layer, 5, joint=False), Budget(300), counter)
    assert found is not None
    assert bool((counter < 5 * 300).all())
    segments = found.attended_segments()
    assert len(segments) == replaced
    for part in segments:
        left = (part.log_counts[:, 0] - context.tensors["rest_bias"]).exp().sum(1)
        assert left.tolist() == pytest.approx((5000 - counter).tolist(), rel=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_question_is_chosen_for_together(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, context = coded_layer(5000, seed=seed)
    queries = several(layer, 7, joint=True)
    found = by_kernels(monkeypatch, Codes(), context).select(queries, Budget(400))
    scores = shares(*estimates(context, queries)).mean(1, keepdim=True)
    chosen = as_mask(found.rows.starts, 5000)
    assert chosen.sum(-1).tolist() == [[400], [400]]
    NearBest.of_all(scores).best(scores, 400, BY_LOGITS).check(chosen)
    assert found.cost == Codes().prepare(context).select(queries, Budget(400)).cost


@pytest.mark.parametrize(("method", "budget"), [(Codes(rerank=2.0), 300), (Codes(), 5000)])
def test_where_there_are_no_kernels_for_several(method: Codes, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, context = coded_layer(5000)
    counter = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    selector = by_kernels(monkeypatch, method, context)
    assert selector.choose_for_each(several(layer, 3, joint=False), Budget(budget), counter) is None


@pytest.mark.gpu
@pytest.mark.parametrize("rerank", [1.0, 2.0])
@pytest.mark.parametrize(
    ("keys", "query"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_a_step_on_a_gpu_waits_for_nothing(
    keys: torch.dtype, query: torch.dtype, rerank: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives the same again."""
    layer, context = coded_layer(5000, keys)
    selector = by_kernels(monkeypatch, Codes(rerank=rerank), context)
    _, step = one_step(layer, query)
    selector.select(step, Budget(300))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found, again = selector.select(step, Budget(300)), selector.select(step, Budget(300))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.rows.starts, again.rows.starts)
