"""A step's choice by kernels that read all codes: what torch chooses, but for scores too near to tell apart."""

from dataclasses import replace

import pytest
import torch
from support.coded_layer import coded_layer
from support.kernel_runs import DEVICE
from support.random_tensors import normal
from support.small_layer import SmallLayer, as_queries

from sparsekv.kernels.tables.types import ExactKeys
from sparsekv.runtime.methods.codes import Codes, CodesSelector
from sparsekv.runtime.selection import code_scan
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.context import MiddleContext
from sparsekv.runtime.selection.queries import InPlace, Queries
from sparsekv.runtime.selection.selection import Selection

EXACT = 20


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


def rows_of(selection: Selection) -> torch.Tensor:
    return selection.rows.starts[:, 0].long().sort(-1).values.cpu()


def overlap(found: Selection, expected: Selection) -> float:
    pairs = zip(rows_of(found), rows_of(expected), strict=True)
    return min(float(torch.isin(one, other).float().mean()) for one, other in pairs)


@pytest.mark.parametrize("rerank", [1.0, 2.0])
@pytest.mark.parametrize("replaced", [True, False])
def test_as_torch_chooses(rerank: float, replaced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, context = coded_layer(5000)
    method, (plain, in_place) = Codes(rerank=rerank, replace=replaced), one_step(layer)
    expected = method.prepare(context).select(plain, Budget(300))
    found = by_kernels(monkeypatch, method, context).select(in_place, Budget(300))
    assert overlap(found, expected) >= 0.9
    assert found.cost == expected.cost
    assert found.rest is not None
    assert (found.rest.in_place is not None) == replaced
    (left,) = found.rest.segments()
    in_place = found.rest.in_place
    weights = (left.log_counts if in_place is None else in_place[0].log_weights()).exp().sum()
    assert float(weights) == pytest.approx(float(left.log_counts.exp().sum()), rel=1e-5)


def several(layer: SmallLayer, number: int, *, joint: bool) -> Queries:
    """So many queries, each with exact rows of its own."""
    query = layer.queries[:, :, :number].to(DEVICE)
    beside = 2 + normal(4, *query.shape[:3]).to(DEVICE)
    return replace(as_queries(query), exact_logsumexp=lambda: beside, joint=joint)


@pytest.mark.parametrize("replaced", [True, False])
def test_several_queries_share_what_each_chooses_by_itself(replaced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, context = coded_layer(5000)
    method, queries = Codes(replace=replaced), several(layer, 5, joint=False)
    each = method.prepare(context).select(queries, Budget(300))
    selector, counter = by_kernels(monkeypatch, method, context), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    found = selector.choose_for_each(queries, Budget(300), counter)
    assert found is not None
    assert found.rows.indices is not None
    used = found.rows.indices.used
    assert torch.equal(counter, used.long())
    assert bool((used < 5 * 300).all())
    for head in range(2):
        together = found.rows.indices.rows[head, : int(used[head])].cpu()
        assert bool((together.diff() > 0).all())
        shares = [torch.isin(own.cpu(), together).double().mean() for own in each.rows.starts[head]]
        assert sum(map(float, shares)) / len(shares) >= 0.93
        assert len(together) <= 1.1 * len(each.rows.starts[head].unique())
    segments = found.attended_segments()
    assert len(segments) == replaced
    for part in segments:
        left = (part.log_counts[:, 0] - context.tensors["rest_bias"]).exp().sum(1)
        assert left.tolist() == pytest.approx((5000 - used).tolist(), rel=1e-4)


def test_a_question_is_chosen_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, context = coded_layer(5000)
    queries = several(layer, 7, joint=True)
    expected = Codes().prepare(context).select(queries, Budget(400))
    found = by_kernels(monkeypatch, Codes(), context).select(queries, Budget(400))
    assert overlap(found, expected) >= 0.95
    assert found.cost == expected.cost


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
