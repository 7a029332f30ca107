"""Tuning: the cheapest setting that meets a target, with a budget for each layer, chosen on one half of the queries and
verified on the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

import torch

from sparsekv.formats.index.reader import CPU, Artifact
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.reporting.queries import measured_files
from sparsekv.runtime.selection.interface import MethodSpec
from sparsekv.runtime.tuning.coarse_search import (
    RAISES,
    Candidate,
    CoarseSearch,
    FineSearch,
    candidates,
    rounded,
    uniform,
)
from sparsekv.runtime.tuning.goals import Goal, Halves, Progress, Tuned
from sparsekv.runtime.tuning.meter import AttentionMeter

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


CURVE = (0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 6.0)
"""The budgets that a single layer may get, as multiples of the budget for all layers."""
LEAST_SAVING = 0.97
"""Budgets by layer are kept if they read at most this share of what one budget for all layers reads."""


def by_layer(halves: Halves, one: Candidate) -> Tuned | None:
    """A candidate's setting with a budget for each layer; None if that is not worthwhile.

    It needs a separate curve for each layer, which neither forms with state shared by layers nor a perplexity have.
    """
    same, meter = uniform(halves, one), halves.calibration
    if not same.holds or not isinstance(meter, AttentionMeter) or one.form in meter.shared:
        return None
    curve = sorted({rounded(same.budget * times) for times in CURVE})
    halves.measure(meter, [(one.form, halves.everywhere(share)) for share in curve])
    points = [[meter.at(one.form, share, layer) for share in curve] for layer in halves.layers]
    options = [[Option(point.kv_fraction, halves.gain_at(point)) for point in layer] for layer in points]
    aim = one.search.target
    for _ in range(RAISES + 1):
        chosen = allocate(options, aim)
        if chosen is None:
            return None
        shares = {layer: curve[number] for layer, number in zip(halves.layers, chosen, strict=True)}
        halves.measure(halves.held_out, [(one.form, shares)])
        found = halves.tuned(one.form, fmean(shares.values()), shares, aim, by_layer=True)
        if found.kv_fraction > LEAST_SAVING * same.kv_fraction:
            return None
        if found.holds:
            return found
        aim += halves.gap(one.form, shares)
    return None


@torch.inference_mode()
def tune(
    artifact: Artifact,
    goal: Goal,
    names: list[str],
    progress: Progress = lambda stage, done, of: None,
    device: torch.device = CPU,
    time: Callable[[MethodSpec, float], float] | None = None,
    present: DecodeConfig | None = None,
) -> tuple[list[Tuned], Tuned | None]:
    """Find each method's cheapest setting that meets a goal, sorted by reads, or by the time of a step.

    Needs the memory of one layer, with all methods prepared for it.

    Args:
        names: the methods; empty for all that can run on the index.
        progress: called with a round's name, the number of layers or settings done, and the total.
        time: gives the milliseconds of a step of a form at a share, by which what was found is ranked; None: by reads.
        present: a config with shares for budgets; if it is of a method, it is measured beside what is found.

    Returns:
        One setting per method, those that miss the goal last, the nearest first; and the present one, as measured.

    Raises:
        UsageError: a method that cannot run, or that is a bound such as the oracle.
    """
    forms = candidates(artifact, names, residual=goal.residual)
    artifact.check_sums(measured_files(artifact, {form.name for form in forms}, artifact.manifest.indexed_layers))
    halves = Halves(artifact, goal, progress, device)
    search = FineSearch(halves, CoarseSearch(artifact, halves, device).promising(forms))
    contenders = search.run()
    tuned = search.settings()
    tuned += [one for first in search.contenders(contenders)[:1] if (one := by_layer(halves, first)) is not None]
    attention = None if present is None else present.attention
    before = halves.as_it_is(attention, present) if present and isinstance(attention, MethodSpec) else None
    if time is not None:
        tuned = [replace(one, step_ms=time(one.form, one.budget)) if one.holds else one for one in tuned]
        before = before and replace(before, step_ms=time(before.form, before.budget))
    return _best_of_each(tuned, goal), before


def _best_of_each(tuned: list[Tuned], goal: Goal) -> list[Tuned]:
    """Each method's best setting: those that meet the goal by their cost, then the others by their distance from it."""

    def rank(one: Tuned) -> tuple[bool, float]:
        return not one.holds, one.cost if one.holds else -goal.gain(one.held_out)

    best: dict[str, Tuned] = {}
    for one in sorted(tuned, key=rank):
        best.setdefault(one.form.name, one)
    return list(best.values())
