"""One budget for each layer: what is read goes to the layers where it brings most."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SLACK = 1e-12  # relative: what rounding of sums may take from a target


@dataclass(frozen=True)
class Option:
    """What one layer could do: what that reads, and how much of what is wanted it holds (more is better)."""

    cost: float
    gain: float


def allocate(layers: Sequence[Sequence[Option]], target: float) -> list[int] | None:
    """One option for each layer, by number, of little mean cost, where the mean gain is at least the target.

    Begins with every layer's cheapest option and takes the steps up the layers' convex hulls that gain most for what
    they cost, then cheaper options where there is gain to spare. It costs at most one such step more than the best
    choice there is, and never more than the same option in all layers.

    Args:
        layers: the options of each, in the same order in all layers.

    Returns:
        None when no choice reaches the target.
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
    reaching = [one for one in (_thriftier(layers, chosen, needed), *same) if _gain(layers, one) >= needed]
    return min(reaching, key=lambda one: _cost(layers, one), default=None)


def _gain(layers: Sequence[Sequence[Option]], chosen: list[int]) -> float:
    return sum(options[number].gain for options, number in zip(layers, chosen, strict=True))


def _cost(layers: Sequence[Sequence[Option]], chosen: list[int]) -> float:
    return sum(options[number].cost for options, number in zip(layers, chosen, strict=True))


def _hull(options: Sequence[Option]) -> list[int]:
    """Options from the cheapest to the one of most gain, each step gaining less for its cost than the one before."""
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
    """Layer and option of every step up the hulls, the best for its cost first."""
    steps = []
    for layer, options in enumerate(layers):
        hull = _hull(options)
        steps += [(_slope(options, *pair), layer, pair[1]) for pair in pairwise(hull)]
    return [(layer, number) for _, layer, number in sorted(steps, key=lambda step: -step[0])]


def _thriftier(layers: Sequence[Sequence[Option]], chosen: list[int], needed: float) -> list[int]:
    """The same choice with the cheaper option, again and again, that saves most and still leaves the gain needed."""
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
