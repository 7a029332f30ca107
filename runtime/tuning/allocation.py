"""Chooses a budget for each layer, so that reads are spent in the layers where they gain most."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SLACK = 1e-12  # relative; rounding error allowed in the sums that are compared with a target


@dataclass(frozen=True)
class Option:
    """One setting for one layer: what it reads (`cost`), and its measure as a gain (more is better)."""

    cost: float
    gain: float


def allocate(layers: Sequence[Sequence[Option]], target: float) -> list[int] | None:
    """Choose an option for each layer, at low mean cost, so that the mean gain reaches the target.

    Starts with every layer's cheapest option, takes steps up the layers' convex hulls in order of gain per cost until
    the target is reached, then uses cheaper options while there is gain to spare. The result costs at most one such
    step more than the optimum, and never more than the same option in all layers.

    Args:
        layers: the options of each layer, in the same order in all layers.

    Returns:
        The number of each layer's option; None when no choice reaches the target.
    """
    needed = target * len(layers) - SLACK * max(1.0, abs(target)) * len(layers)
    chosen = [hull[0] for hull in map(_hull, layers)]
    gain = sum(options[number].gain for options, number in zip(layers, chosen, strict=True))
    for layer, number in _steps(layers):
        if gain >= needed:
            break
        gain += layers[layer][number].gain - layers[layer][chosen[layer]].gain
        chosen[layer] = number
    same = [[number] * len(layers) for number in range(len(layers[0]))]
    reaching = [one for one in (_cheaper(layers, chosen, needed), *same) if _gain(layers, one) >= needed]
    return min(reaching, key=lambda one: _cost(layers, one), default=None)


def _gain(layers: Sequence[Sequence[Option]], chosen: list[int]) -> float:
    return sum(options[number].gain for options, number in zip(layers, chosen, strict=True))


def _cost(layers: Sequence[Sequence[Option]], chosen: list[int]) -> float:
    return sum(options[number].cost for options, number in zip(layers, chosen, strict=True))


def _hull(options: Sequence[Option]) -> list[int]:
    """The upper convex hull: options from the cheapest to the one of most gain, with falling gain per cost."""
    hull: list[int] = []
    for number in sorted(range(len(options)), key=lambda number: (options[number].cost, -options[number].gain)):
        if hull and options[number].gain <= options[hull[-1]].gain:
            continue
        while len(hull) > 1 and _slope(options, hull[-2], hull[-1]) <= _slope(options, hull[-1], number):
            hull.pop()
        hull.append(number)
    return hull


def _slope(options: Sequence[Option], first: int, second: int) -> float:
    cost = options[second].cost - options[first].cost
    return (options[second].gain - options[first].gain) / cost if cost > 0 else float("inf")


def _steps(layers: Sequence[Sequence[Option]]) -> list[tuple[int, int]]:
    """Layer and option of every step up the hulls, in order of falling gain per cost."""
    steps = []
    for layer, options in enumerate(layers):
        hull = _hull(options)
        steps += [(_slope(options, *pair), layer, pair[1]) for pair in pairwise(hull)]
    return [(layer, number) for _, layer, number in sorted(steps, key=lambda step: -step[0])]


def _cheaper(layers: Sequence[Sequence[Option]], chosen: list[int], needed: float) -> list[int]:
    """The choice after repeatedly taking the cheaper option that saves most while the gain still suffices."""
    chosen = list(chosen)
    while True:
        spare = _gain(layers, chosen) - needed
        savings = [
            (options[chosen[layer]].cost - option.cost, layer, number)
            for layer, options in enumerate(layers)
            for number, option in enumerate(options)
            if option.cost < options[chosen[layer]].cost and options[chosen[layer]].gain - option.gain <= spare
        ]
        if not savings:
            return chosen
        _, layer, number = max(savings)
        chosen[layer] = number
