"""Tuning: search for the cheapest setting that meets a goal, with one budget or a budget for each layer.

Settings are chosen on one half of the tail's queries and verified on the other half.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

import torch

from sparsekv.formats.index.reader import CPU, Artifact
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.reporting.recall import measured_files
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
from sparsekv.runtime.tuning.goals import AttentionMeter, Goal, Halves, Progress, Tuned

SLACK = 1e-12  # relative rounding error that is allowed in the sums of gains that are compared with a target


@dataclass(frozen=True)
class Option:
    """One setting of one layer. `cost` is the KV fraction; `gain` is the goal's measure, and larger is better."""

    cost: float
    gain: float


def allocate(layers: Sequence[Sequence[Option]], target: float) -> list[int] | None:
    """Choose an option for each layer, at low mean cost, so that the mean gain reaches the target.

    The search starts with the cheapest option of every layer. Then it takes steps to the next option on a layer's
    convex hull, in the order of gain per cost, until the target is reached. Finally it replaces options by cheaper
    ones, as long as the gain suffices. The result costs at most one step more than the optimum. It never costs more
    than the same option in all layers, if that option reaches the target.

    Args:
        layers: the options of each layer, in the same order in all layers.

    Returns:
        The index of each layer's option; None if no choice reaches the target.
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
    """Return the upper convex hull of gain over cost: numbers of options, from the cheapest to the largest gain."""
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
    """Return the steps along the layers' convex hulls of gain over cost, by falling gain per cost.

    A step is a pair: the layer, and the number of the layer's next option.
    """
    steps = []
    for layer, options in enumerate(layers):
        hull = _hull(options)
        steps += [(_slope(options, *pair), layer, pair[1]) for pair in pairwise(hull)]
    return [(layer, number) for _, layer, number in sorted(steps, key=lambda step: -step[0])]


def _cheaper(layers: Sequence[Sequence[Option]], chosen: list[int], needed: float) -> list[int]:
    """Replace one option after another by the cheaper option that saves most, while the gain still suffices.

    `chosen` has the number of each layer's option. The options are replaced in a copy of it, which is returned.
    """
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
"""Budgets that one layer may get, as multiples of the common budget of all layers."""
LEAST_SAVING = 0.97
"""Maximum KV fraction of a setting with a budget for each layer, divided by that of the setting with one budget."""


def by_layer(halves: Halves, one: Candidate) -> Tuned | None:
    """Find a candidate's setting with a budget for each layer that meets the goal; None if none is found.

    The result is also None if the candidate's setting with one budget misses the goal, or if the new setting's KV
    fraction is more than LEAST_SAVING times that of the setting with one budget. The search needs the measure of each
    layer at several budgets. Therefore it finds nothing for a variant whose layers share state, and for a goal on
    perplexity.
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
    """Find each method's cheapest setting that meets a goal, sorted by KV fraction or by the time of a step.

    Needs the memory of one layer and of all methods' tensors for that layer.

    Args:
        names: names of methods; empty: all methods that can run on the index.
        progress: called with a round's name, the number of measured layers or settings, and the total.
        time: returns the milliseconds of a decode step of a variant at a budget, for sorting settings. None: settings
            are sorted by KV fraction.
        present: the config by which the index answers at present. None: no config is known.

    Returns:
        One setting per method, then the measured setting of `present`, which is None if `present` is dense or None.
        Settings that miss the goal are last, the nearest to the goal first.

    Raises:
        UsageError: a method cannot run, or is a bound such as the oracle.
        ArtifactError: a file that is measured has changed.
        Further errors are those of `goal.meters` and of `time`.
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
    """Return each method's best setting: first those that meet the goal, by cost, then others by distance to it."""

    def rank(one: Tuned) -> tuple[bool, float]:
        return not one.holds, one.cost if one.holds else -goal.gain(one.held_out)

    best: dict[str, Tuned] = {}
    for one in sorted(tuned, key=rank):
        best.setdefault(one.form.name, one)
    return list(best.values())
