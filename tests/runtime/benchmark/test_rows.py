"""Rows of a benchmark: what a step is said to read, counted by hand; dense forms; and what is refused."""

from dataclasses import replace

import pytest
import torch
from support.reference import assert_close, reference_attention

from sparsekv.cli.benchmarking.output import MixtureIndexer
from sparsekv.indexing.methods.squeezed import SqueezedIndexer
from sparsekv.runtime.benchmark.clock import CudaClock, WallClock
from sparsekv.runtime.benchmark.layer import (
    SINKS,
    TAIL,
    LayerData,
    Shape,
    exact_output,
    layer_step,
    mixture,
    relative_error,
)
from sparsekv.runtime.benchmark.layer_timer import OWN, Bench, RefusedError, StepTiming, dense_forms
from sparsekv.runtime.benchmark.sources import index_mixture
from sparsekv.runtime.cache.stored_layer import DenseLayer
from sparsekv.runtime.methods.oracle import Oracle
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.methods.window import Window
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec

CPU = torch.device("cpu")
SHAPE = Shape(context=600, heads=4, kv_heads=2, head_dim=16)
MIDDLE = 600 - SINKS - TAIL
BATCH, ROW_BYTES = 2, 16 * 4
COPY = 1e9


@pytest.fixture(scope="module")
def data() -> LayerData:
    return mixture(SHAPE, BATCH, 0, CPU, torch.float32)


def bench(data: LayerData) -> Bench:
    return Bench(data, WallClock(CPU, 3, cold=False), COPY)


def rows_of(at: Bench, name: str, method: Method, *budgets: Budget) -> list[StepTiming]:
    """A method that has no index, at budgets."""
    return list(at.sparse(MethodSpec(name, "", method), at.data.context({}), list(budgets)))


def by_hand(data: LayerData, name: str, method: Method, budget: Budget) -> StepTiming:
    at = bench(data)
    at.dense()
    return rows_of(at, name, method, budget)[0]


def test_a_window_reads_sinks_and_tail(data: LayerData) -> None:
    row = by_hand(data, "window", Window(), Budget(0.05))
    assert row.bytes == 2 * BATCH * SHAPE.kv_heads * (SINKS + TAIL) * ROW_BYTES
    assert row.kv_fraction == 0


def test_pages_read_their_extremes_and_the_chosen_rows(data: LayerData) -> None:
    row = by_hand(data, "quest", Quest(page_size=16), Budget(64))
    pages = -(-MIDDLE // 16)
    of_middle = 2 * 64 + 2 * pages
    assert row.bytes == BATCH * SHAPE.kv_heads * (of_middle + 2 * (SINKS + TAIL)) * ROW_BYTES
    assert row.kv_fraction == of_middle / (2 * MIDDLE)
    assert (row.context, row.batch, row.budget, row.budget_tokens) == (600, BATCH, 64, 64)


def test_dense_attention_reads_everything_and_is_the_measure_of_all(data: LayerData) -> None:
    at = bench(data)
    *rows, own = at.dense()
    assert [row.median_ms for row in rows] == sorted(row.median_ms for row in rows)
    assert (rows[0].speedup, own.variant) == (1, OWN)
    rows += [own, *rows_of(at, "oracle", Oracle(), Budget(0.1), Budget(1.0))]
    for row in rows:
        assert row.speedup == rows[0].median_ms / row.median_ms
        assert row.floor_ms == 1000 * row.bytes / COPY
        assert row.floor_share == pytest.approx(row.floor_ms / row.median_ms)
        assert row.bandwidth == pytest.approx(row.floor_share * COPY)
        assert row.lower_ms <= row.median_ms <= row.upper_ms
    assert all(row.bytes == 2 * BATCH * SHAPE.kv_heads * 600 * ROW_BYTES for row in rows[:-2])
    assert rows[-2].output_error > 1e-3
    assert max(row.output_error for row in (*rows[:-2], rows[-1])) < 1e-5


def test_every_form_of_dense_attention_is_attention(data: LayerData) -> None:
    query = data.query.unflatten(0, (len(data.keys), -1))
    expected = reference_attention(query, data.keys, data.values, data.facts.softmax_scale).flatten(0, 1)
    assert_close(exact_output(data), expected, 1e-5)
    forms = dict(dense_forms(data))
    assert len(forms) == 2
    for form in forms.values():
        assert_close(form(data.query), expected, 1e-5)


QUESTIONS = 5


@pytest.fixture(scope="module")
def asked() -> LayerData:
    """Several questions over one context."""
    return mixture(SHAPE, 1, 0, CPU, torch.float32, questions=QUESTIONS)


def test_every_form_of_dense_attention_is_that_of_each_question(asked: LayerData) -> None:
    query = asked.query.unflatten(0, (len(asked.keys), -1))
    expected = reference_attention(query, asked.keys, asked.values, asked.facts.softmax_scale).flatten(0, 1)
    assert_close(exact_output(asked), expected, 1e-5)
    for form in dict(dense_forms(asked)).values():
        assert_close(form(asked.query), expected, 1e-5)
    assert_close(layer_step(asked, DenseLayer(asked.keys, asked.values))(), expected, 1e-5)


def test_questions_over_one_context_read_it_once(asked: LayerData) -> None:
    at = bench(asked)
    dense = at.dense()
    assert all(row.bytes == 2 * SHAPE.kv_heads * 600 * ROW_BYTES for row in dense)
    some, everything = rows_of(at, "oracle", Oracle(), Budget(0.1), Budget(1.0))
    assert (some.batch, everything.kv_fraction) == (QUESTIONS, 1)
    assert 0.1 < some.kv_fraction < 0.1 * QUESTIONS
    assert everything.output_error < 1e-5 < some.output_error


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "timed"),
    [
        (Squeezed(), "graph"),
        (Squeezed(selection="threshold"), "graph"),
        (Squeezed("hierarchical"), "graph"),
        (Squeezed("hierarchical", "threshold"), "eager"),
    ],
    ids=str,
)
def test_a_gpu_replays_a_step_unless_it_waits(method: Squeezed, timed: str) -> None:
    """Down two levels thresholds size what is gathered, for which the host has to know how much that is."""
    cuda = torch.device("cuda")
    data = mixture(Shape(2048, 8, 2, 64), BATCH, 0, cuda, torch.bfloat16)
    at = Bench(data, CudaClock(cuda, 3, cold=True), COPY)
    assert {row.timed for row in at.dense()} == {"graph"}
    context = index_mixture(data, MixtureIndexer(SqueezedIndexer())).context
    some, everything = at.sparse(MethodSpec("squeezed", "", method), context, [Budget(0.2), Budget(1.0)])
    # A budget of everything goes without the levels.
    assert (some.timed, everything.timed) == (timed, "graph")
    assert everything.output_error < 1e-2
    assert everything.output_error < some.output_error < 1


def test_errors_are_relative_to_each_head() -> None:
    exact = torch.tensor([[[3.0, 4.0]], [[0.0, 10.0]]])
    output = exact + torch.tensor([[[0.0, 0.5]], [[3.0, 0.0]]])
    assert relative_error(output, exact) == pytest.approx((0.1 + 0.3) / 2)


def test_what_is_no_number_has_no_time(data: LayerData) -> None:
    values = data.values.clone()
    values[1, 300] = torch.nan
    broken = bench(replace(data, values=values))
    with pytest.raises(RefusedError, match=r"dense sdpa.* over 600 tokens, batch 2, gave an output that is not finite"):
        broken.dense()
    with pytest.raises(RefusedError, match=r"oracle at 100% .*not finite"):
        rows_of(broken, "oracle", Oracle(), Budget(1.0))
