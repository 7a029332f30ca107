"""The meter of what a step leaves, and the guard that reads more where that is too much."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import assert_close, attention_probabilities, reference_attention
from support.replaced import Step
from support.small_layer import SmallLayer, all_chosen, small_layer

from sparsekv.formats.errors import UsageError
from sparsekv.kernels.attention.attention import causal_mask
from sparsekv.runtime.attention.guard import DOUBLINGS, Attempt, Guard, check_estimates_missed
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec, Selector
from sparsekv.runtime.selection.wrappers import ResidualSelector, residual_clusters

TELLING: dict[str, Method] = {
    "squeezed": Squeezed(),
    "squeezed down the levels": Squeezed("hierarchical"),
    "squeezed by threshold": Squeezed("flat", "threshold"),
    "multipole": Multipole(),
    "multipole down the levels": Multipole("hierarchical"),
    "multipole without replacement": Multipole(replace=False),
}
telling = st.sampled_from(sorted(TELLING))
SINKS = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, -3.0]])


def _layer(name: str, seed: int, **more: object) -> SmallLayer:
    return small_layer(seed, block=64 if name.startswith("multipole") else None, **more)  # type: ignore[arg-type]


def _truth(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention [Hk, G, Q, D] and probabilities [Hk, G, Q, M + exact] of a step, in float64."""
    layer, facts = step.layer, step.layer.context.facts
    keys, values = (
        torch.cat([rows[:, layer.middle], exact], 1)
        for rows, exact in zip((layer.keys, layer.values), step.exact, strict=True)
    )
    queries = step.query.shape[2]
    causal = causal_mask(queries, keys.shape[1], None, keys.device)
    options = {"softmax_scale": facts.softmax_scale, "softcap": facts.softcap, "sink_logits": step.sink_logits}
    return (
        reference_attention(step.query, keys, values, mask=causal, **options),
        attention_probabilities(step.query, keys, mask=causal, **options),
    )


def _left(step: Step, selector: Selector) -> torch.Tensor:
    """[Hk, Q]: true probability of what was not chosen, mean over the group."""
    _, probabilities = _truth(step)
    for head, of_head in enumerate(all_chosen(step.selection, selector)):
        for query in range(step.query.shape[2]):
            probabilities[head, :, query, of_head[query if len(of_head) > 1 else 0]] = 0
    return probabilities[..., : step.layer.split.middle].sum(-1).mean(1)


@given(telling, st.integers(0, 100), st.floats(0.05, 0.9), st.integers(1, 3), st.sampled_from([None, SINKS]))
@settings(max_examples=40)
def test_with_a_token_a_cluster_the_estimate_is_the_truth(
    name: str, seed: int, share: float, queries: int, sinks: torch.Tensor | None
) -> None:
    layer = _layer(name, seed, levels=(1.0, 0.999))
    selector = TELLING[name].prepare(layer.context)
    step = Step(layer, selector, Budget(share), queries=queries, seed=seed, sink_logits=sinks, gauge=True)
    left = _left(step, selector)
    assert step.meter.means() == pytest.approx((float(left.mean()), 0.0, 0.0), abs=1e-5)
    assert step.meter.heads == left.numel()


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("method", [Quest(page_size=7), Squeezed("flat", "threshold")], ids=["quest", "squeezed"])
def test_what_stands_for_tokens_is_what_is_left_of_them(method: Method, queries: int) -> None:
    """With a token a cluster in a residual: also where the method has an estimate of its own of what it drops."""
    layer, clusters = _layer("squeezed", 3), _layer("multipole", 3, levels=(1.0,)).context.tensors
    selector = ResidualSelector(method.prepare(layer.context), residual_clusters(clusters))
    step = Step(layer, selector, Budget(0.2), queries=queries, gauge=True)
    assert step.meter.means()[0] == pytest.approx(float(_left(step, selector).mean()), abs=1e-5)


@given(telling, st.integers(0, 100), st.floats(0.05, 0.3), st.integers(1, 3))
@settings(max_examples=25)
def test_clusters_estimate_too_little(name: str, seed: int, share: float, queries: int) -> None:
    """By Jensen's inequality: a mean of exponents is no less than the exponent of the mean."""
    layer = _layer(name, seed)
    selector = TELLING[name].prepare(layer.context)
    step = Step(layer, selector, Budget(share), queries=queries, seed=seed, gauge=True)
    left = float(_left(step, selector).mean())
    assert 0 < step.meter.means()[0] <= left + 1e-5


@given(telling, st.integers(0, 100), st.integers(1, 3), st.sampled_from([None, SINKS]))
@settings(max_examples=25)
def test_a_guard_that_allows_nothing_is_dense_attention(
    name: str, seed: int, queries: int, sinks: torch.Tensor | None
) -> None:
    layer, guard = _layer(name, seed), Guard(1e-9)
    step = Step(layer, TELLING[name].prepare(layer.context), Budget(2), queries=queries, sink_logits=sinks, guard=guard)
    assert_close(step.output, _truth(step)[0], 1e-5)
    assert step.meter.means() == (0.0, 1.0, 1.0)


@given(telling, st.integers(0, 100), st.integers(1, 3))
@settings(max_examples=25)
def test_a_guard_that_allows_everything_changes_nothing(name: str, seed: int, queries: int) -> None:
    layer, guard = _layer(name, seed), Guard(1 - 1e-9)
    selector = TELLING[name].prepare(layer.context)
    guarded = Step(layer, selector, Budget(0.1), queries=queries, seed=seed, guard=guard)
    plain = Step(layer, TELLING[name].prepare(layer.context), Budget(0.1), queries=queries, seed=seed)
    assert_close(guarded.output, plain.output, 1e-5)
    assert guarded.meter.means()[1:] == (0.0, 0.0)
    assert guarded.sparse.read.total() == plain.sparse.read.total()


@given(st.lists(st.lists(st.floats(0, 1), min_size=6, max_size=6), min_size=DOUBLINGS + 1, max_size=DOUBLINGS + 1))
def test_each_head_and_query_keeps_the_first_attempt_that_holds(missed: list[list[float]]) -> None:
    tries = torch.tensor(missed).view(-1, 2, 3)

    def attempt(budget: Budget) -> Attempt:
        raised = (budget.tokens(1000) // 10).bit_length() - 1
        return Attempt(tries[raised], torch.full((2, 3), 10.0**raised), (torch.full((2, 3, 4), raised),))

    def dense(heads: torch.Tensor) -> Attempt:
        assert heads.tolist() == (tries > 0.5).all(0).any(1).tolist()
        return Attempt(torch.zeros(2, 3), torch.full((2, 3), 1e6), (torch.full((2, 3, 4), -1),))

    held = Guard(0.5).enforce(attempt, dense, Budget(10), 1000)
    for head in range(2):
        for query in range(3):
            good = [number for number, one in enumerate(tries[:, head, query] <= 0.5) if one]
            first, failed = (good[0], good[0]) if good else (-1, DOUBLINGS + 1)
            read = sum(10.0**raised for raised in range(failed)) + (10.0**first if good else 1e6)
            assert held.attempt.results[0][head, query].tolist() == [first] * 4
            assert float(held.attempt.rows[head, query]) == read
            assert float(held.attempt.missed[head, query]) == (float(tries[first, head, query]) if good else 0.0)
            assert (bool(held.raised[head, query]), bool(held.dense[head, query])) == (first != 0, not good)


def test_a_budget_is_not_doubled_past_everything() -> None:
    asked: list[int] = []

    def attempt(budget: Budget) -> Attempt:
        asked.append(budget.tokens(100))
        return Attempt(torch.ones(1, 1), torch.ones(1, 1), ())

    held = Guard(0.5).enforce(attempt, lambda heads: Attempt(torch.zeros(1, 1), torch.ones(1, 1), ()), Budget(40), 100)
    assert asked == [40, 80]
    assert bool(held.dense.all())


def test_rewinding_forgets_what_was_left() -> None:
    step = Step(_layer("squeezed", 0), Squeezed().prepare(_layer("squeezed", 0).context), Budget(5), gauge=True)
    assert step.meter.means()[0] > 0
    step.sparse.rewind()
    assert step.sparse.missed() is None


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, float("nan")])
def test_a_guard_is_a_share(share: float) -> None:
    with pytest.raises(UsageError, match="give a share between 0 and 1"):
        Guard(share)


def test_a_method_that_cannot_tell_needs_centroids() -> None:
    with pytest.raises(UsageError, match="quest cannot estimate how much attention"):
        check_estimates_missed("--guard", MethodSpec("quest", "", Quest()))
    check_estimates_missed("--guard", MethodSpec("quest", "", Quest(), residual=True))
    layer = _layer("multipole", 3, levels=(1.0,))
    selector = ResidualSelector(Quest().prepare(layer.context), residual_clusters(layer.context.tensors))
    step = Step(layer, selector, Budget(0.1), gauge=True)
    assert step.meter.means()[0] == pytest.approx(float(_left(step, selector).mean()), abs=1e-5)
