"""Budgets by layer: against every choice there is, on small curves."""

from itertools import product
from statistics import fmean

from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekv.runtime.tuning.tuning import Option, allocate

parts = st.integers(0, 40).map(lambda part: part / 40)
curves = st.integers(2, 5).flatmap(
    lambda options: st.lists(
        st.lists(st.builds(Option, cost=parts, gain=parts), min_size=options, max_size=options), min_size=1, max_size=4
    )
)


def _mean(layers: list[list[Option]], chosen: tuple[int, ...], name: str) -> float:
    return fmean(float(getattr(options[number], name)) for options, number in zip(layers, chosen, strict=True))


@given(curves, parts)
@settings(max_examples=100)
def test_a_choice_reaches_the_target_and_is_near_the_best(layers: list[list[Option]], target: float) -> None:
    every = list(product(range(len(layers[0])), repeat=len(layers)))
    reaching = [one for one in every if _mean(layers, one, "gain") >= target - 1e-9]
    found = allocate(layers, target)
    if not reaching:
        assert found is None
        return
    assert found is not None
    assert _mean(layers, tuple(found), "gain") >= target - 1e-9
    cost = _mean(layers, tuple(found), "cost")
    same = [one for one in reaching if len(set(one)) == 1]
    assert cost <= min((_mean(layers, one, "cost") for one in same), default=1.0) + 1e-9
    largest_step = max(abs(one.cost - two.cost) for options in layers for one in options for two in options)
    assert cost <= min(_mean(layers, one, "cost") for one in reaching) + largest_step / len(layers) + 1e-9


@given(st.lists(st.tuples(parts, parts), min_size=2, max_size=6), st.integers(1, 8))
@settings(max_examples=50)
def test_equal_layers_with_falling_returns_differ_by_one_step_at_most(steps: list[tuple[float, float]], n: int) -> None:
    """Where each step up a curve gains less for its cost than the one before, nothing is won by unequal budgets."""
    steps = sorted(((cost + 0.01, gain) for cost, gain in steps), key=lambda step: -step[1] / step[0])
    curve = [Option(0.0, 0.0)]
    for cost, gain in steps:
        curve.append(Option(curve[-1].cost + cost, curve[-1].gain + gain))
    target = curve[len(curve) // 2].gain
    found = allocate([curve] * n, target)
    assert found is not None
    assert sum(curve[number].cost for number in found) <= n * curve[len(curve) // 2].cost + 1e-9


def test_a_layer_that_gains_nothing_is_given_the_least() -> None:
    flat = [Option(0.1, 0.9), Option(0.2, 0.9), Option(0.4, 0.9)]
    steep = [Option(0.1, 0.1), Option(0.2, 0.6), Option(0.4, 0.9)]
    assert allocate([flat, steep], 0.75) == [0, 1]
    assert allocate([flat, steep], 0.9) == [0, 2]
    assert allocate([flat, steep], 0.91) is None
