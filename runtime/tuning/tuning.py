"""Finds the cheapest setting that meets a target: chosen on one half of the tail's queries, verified on the other.

First, all forms of all methods are searched on every third layer with every second query. Then each method's cheapest
forms are searched on all layers with all calibration queries, until their budget is known within a factor or their gain
is little above the target. The results are measured on the held-out half, which no search has used; a result that
misses the target by more than a tolerance is searched again with a target raised by the gap. The cheapest settings are
then searched more closely, and the cheapest of all may get a separate budget for each layer.

A goal about the model itself cannot be measured on a sample of layers: the first search uses an error of attention in
its place, and the model runs only for the forms that remain.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from sparsekv.formats.reader import CPU, Artifact
from sparsekv.runtime.decoding.setting import Setting
from sparsekv.runtime.reporting.checked_rows import measured_files
from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.tuning.allocation import Option, allocate
from sparsekv.runtime.tuning.budget_search import BudgetSearch, rounded
from sparsekv.runtime.tuning.candidates import Candidate, candidates
from sparsekv.runtime.tuning.goals import Goal
from sparsekv.runtime.tuning.meter import AttentionMeter, Meter, Point, Shares
from sparsekv.runtime.tuning.tuned import Tuned

LAYER_STRIDE, QUERY_STRIDE = 3, 2
COARSE_START, COARSE_STEP, COARSE_RATIO = 0.1, 4.0, 1.3
FINE_STEP, FINE_RATIO = 1.2, 1.2
FORMS_KEPT, KEPT_WITHIN = 2, 1.05
"""How many forms of a method are searched on all layers, and their reads at most, as a multiple of its best form's."""
CONTENDERS, CONTENDING_WITHIN = 2, 1.25
"""How many settings are searched more closely, and their reads at most, as a multiple of the best one's."""
RAISES = 2
"""How often a target is raised when the held-out queries miss it."""
ROUNDING = 1e-12
CURVE = (0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 6.0)
"""The budgets that a single layer may get, as multiples of the budget for all layers."""
LEAST_SAVING = 0.97
"""Budgets by layer are kept if they read at most this share of what one budget for all layers reads."""

Progress = Callable[[str, int, int], None]


@torch.inference_mode()
def tune(
    artifact: Artifact,
    goal: Goal,
    names: list[str],
    progress: Progress = lambda stage, done, of: None,
    device: torch.device = CPU,
    time: Callable[[Form, float], float] | None = None,
    present: Setting | None = None,
) -> tuple[list[Tuned], Tuned | None]:
    """Find each method's cheapest setting that meets a goal, sorted by reads, or by the time of a step.

    Needs the memory of one layer, with all methods prepared for it.

    Args:
        names: the methods; empty for all that can run on the index.
        progress: called with a round's name, the number of layers or settings done, and the total.
        device: where attention is measured.
        time: gives the milliseconds of a step of a form at a share, by which what was found is ranked; None: by reads.
        present: a setting with shares for budgets; if it is of a method, it is measured beside what is found.

    Returns:
        One setting per method, those that miss the goal last, the nearest first; and the present one, as measured.

    Raises:
        UsageError: a method that cannot run, or that is a bound such as the oracle.
    """
    forms = candidates(artifact, names, residual=goal.residual)
    artifact.check_sums(measured_files(artifact, {form.name for form in forms}, artifact.manifest.indexed_layers))
    tuner = _Tuner(artifact, goal, progress, device)
    found = tuner.promising(tuner.search_coarsely(forms))
    tuner.search(found)
    tuner.verify(found)
    contenders = tuner.contenders(found)
    tuner.search_closely(contenders)
    tuned = tuner.settings(found, contenders)
    before = None if present is None or present.form is None else tuner.as_it_is(present.form, present)
    if time is not None:
        tuned = [replace(one, step_ms=time(one.form, one.budget)) if one.holds else one for one in tuned]
        before = before and replace(before, step_ms=time(before.form, before.budget))
    return tuner.best_of_each(tuned), before


class _Tuner:
    """The meters of one search, and its stages in the order in which they are called."""

    def __init__(self, artifact: Artifact, goal: Goal, progress: Progress, device: torch.device):
        self.goal, self.rough, self.progress, self.rounds = goal, goal.rough(), progress, 0
        self.target = goal.gain(goal.value)
        self.layers = artifact.manifest.indexed_layers
        self.sample = self.layers[::LAYER_STRIDE]
        self.calibration, self.held_out = goal.meters(artifact, device)
        coarsely: dict[str, Any] = {"stride": QUERY_STRIDE, "outputs": self.rough.outputs}
        self.coarse = AttentionMeter(artifact, goal.reference, calibration=True, device=device, **coarsely)
        self.attention = (
            self.held_out
            if isinstance(self.held_out, AttentionMeter)
            else AttentionMeter(artifact, goal.reference, calibration=False, device=device)
        )

    def search_coarsely(self, found: list[Form]) -> dict[Form, BudgetSearch]:
        """A rough search for every form on a sample; forms that cannot be their method's cheapest are dropped."""
        target = self.rough.gain(self.rough.value)
        # Slightly above the target, so that the first guess on all layers mostly meets it.
        target += self.rough.tolerance / 2
        searches = {form: BudgetSearch(target, COARSE_START, COARSE_STEP, COARSE_RATIO) for form in found}
        while wanted := self._wanted(searches):
            settings = [(form, self._same(share)) for form, share in wanted]
            self.coarse.measure(settings, self._show(len(settings)), self.sample)
            for form, share in wanted:
                point = self._coarse(form, share)
                searches[form].gains[share] = self.rough.gain(self.rough.of(point))
        return searches

    def _wanted(self, searches: dict[Form, BudgetSearch]) -> list[tuple[Form, float]]:
        """The next share to measure for each form that is still searched. A form is dropped when a share that fails the
        target already reads more than its method's best form."""
        best: dict[str, float] = {}
        for form, search in searches.items():
            if search.high is not None:
                best[form.name] = min(best.get(form.name, 1.0), self._coarse(form, search.high).kv_fraction)
        wanted = []
        for form, search in searches.items():
            failing = 0.0 if search.low is None else self._coarse(form, search.low).kv_fraction
            share = search.propose()
            if share is not None and failing < KEPT_WITHIN * best.get(form.name, 1.0):
                wanted.append((form, share))
        return wanted

    def promising(self, searches: dict[Form, BudgetSearch]) -> list[Candidate]:
        """Each method's cheapest forms on the sample; the form of most gain if none meets the target there."""
        kept = []
        for name in dict.fromkeys(form.name for form in searches):
            of_method = {form: search for form, search in searches.items() if form.name == name}
            costs = {
                form: self._coarse(form, high).kv_fraction
                for form, search in of_method.items()
                if (high := search.high) is not None
            }
            order = sorted(costs, key=lambda form: costs[form])
            order = [form for form in order[:FORMS_KEPT] if costs[form] <= KEPT_WITHIN * costs[order[0]]]
            most = {form: max(search.gains.values()) for form, search in of_method.items()}
            hopeless = self.rough is self.goal and max(most.values()) < self.target
            for form in order or [max(most, key=lambda form: most[form])]:
                start, slack = of_method[form].guess(), self.goal.tolerance
                search = BudgetSearch(self.target, start, FINE_STEP, FINE_RATIO, slack)
                kept.append(Candidate(form, search, hopeless))
        return kept

    def search(self, found: list[Candidate]) -> None:
        """Search on all layers, with all calibration queries."""
        while wanted := [(one, share) for one in found if (share := one.propose()) is not None]:
            self._measure(self.calibration, [(one.form, self._same(share)) for one, share in wanted])
            for one, share in wanted:
                point = self.calibration.mean(one.form, self._same(share))
                one.search.gains[share] = self._gain(point)

    def verify(self, found: list[Candidate]) -> None:
        """Measure the candidates on held-out queries; search those that miss again, with a target raised by the gap."""
        while found:
            self._measure(self.held_out, [(one.form, self._same(one.search.best)) for one in found])
            found = [one for one in found if self._raise(one)]
            self.search(found)

    def _raise(self, one: Candidate) -> bool:
        gap = self._gap(one.form, self._same(one.search.best))
        if gap <= self.goal.tolerance or one.search.high is None or one.raised == RAISES or one.hopeless:
            return False
        # Raised from the measured gain, because this may exceed the old target by more than the gap.
        one.search.target = one.search.gains[one.search.best] + gap
        one.raised += 1
        return True

    def contenders(self, found: list[Candidate]) -> list[Candidate]:
        """The few candidates that meet the target and read least."""
        costs = [
            (self.held_out.mean(one.form, shares).kv_fraction, one)
            for one in found
            if self._holds(one.form, shares := self._same(one.search.best))
        ]
        costs = sorted(costs, key=lambda of: of[0])[:CONTENDERS]
        return [one for cost, one in costs if cost <= CONTENDING_WITHIN * costs[0][0]]

    def search_closely(self, found: list[Candidate]) -> None:
        """Search on until the smallest share that meets the target is known to the goal's precision."""
        for one in found:
            one.search.ratio = one.search.step = self.goal.precision
            one.search.slack = 0.0
        self.search(found)
        self.verify(found)

    def compare_attention(self, found: list[Candidate]) -> None:
        """Measure recall and error of the candidates, if the goal's meters have not."""
        self._measure(self.attention, [(one.form, self._same(one.search.best)) for one in found])

    def settings(self, found: list[Candidate], contenders: list[Candidate]) -> list[Tuned]:
        """Each candidate's setting, and that of the best contender by layer, if that is worthwhile."""
        self.compare_attention(found)
        by_layer = [self.by_layer(first) for first in self.contenders(contenders)[:1]]
        return [*map(self.uniform, found), *(one for one in by_layer if one is not None)]

    def uniform(self, one: Candidate) -> Tuned:
        """A candidate's setting with one budget for all layers, as measured on both halves."""
        share = one.search.best
        return self._tuned(one.form, share, self._same(share), one.search.target, by_layer=False)

    def by_layer(self, one: Candidate) -> Tuned | None:
        """A candidate's setting with a budget for each layer; None if that is not worthwhile.

        It needs a separate curve for each layer, which neither forms with state shared by layers nor a perplexity have.
        """
        uniform, meter = self.uniform(one), self.calibration
        if not uniform.holds or not isinstance(meter, AttentionMeter) or one.form in meter.shared:
            return None
        curve = sorted({rounded(uniform.budget * times) for times in CURVE})
        self._measure(self.calibration, [(one.form, self._same(share)) for share in curve])
        options = [[self._option(meter.at(one.form, share, layer)) for share in curve] for layer in self.layers]
        aim = one.search.target
        for _ in range(RAISES + 1):
            chosen = allocate(options, aim)
            if chosen is None:
                return None
            shares = {layer: curve[number] for layer, number in zip(self.layers, chosen, strict=True)}
            self._measure(self.held_out, [(one.form, shares)])
            found = self._tuned(one.form, fmean(shares.values()), shares, aim, by_layer=True)
            if found.kv_fraction > LEAST_SAVING * uniform.kv_fraction:
                return None
            if found.holds:
                return found
            aim += self._gap(one.form, shares)
        return None

    def as_it_is(self, form: Form, setting: Setting) -> Tuned:
        """A setting that was not searched for, as measured on both halves."""
        layers = setting.layer_budgets or {}
        shares = {layer: layers.get(layer, setting.budget).value for layer in self.layers}
        for meter in {id(one): one for one in (self.calibration, self.held_out, self.attention)}.values():
            self._measure(meter, [(form, shares)])
        return self._tuned(form, setting.budget.value, shares, self.target, by_layer=bool(layers))

    def best_of_each(self, tuned: list[Tuned]) -> list[Tuned]:
        """Each method's best setting, the best of all first."""
        best: dict[str, Tuned] = {}
        for one in sorted(tuned, key=self.rank):
            best.setdefault(one.form.name, one)
        return list(best.values())

    def rank(self, one: Tuned) -> tuple[bool, float]:
        """Sort key: settings that meet the goal by their cost, then the others by their distance from it."""
        return not one.holds, one.cost if one.holds else -self.goal.gain(one.held_out)

    def _tuned(self, form: Form, budget: float, shares: Shares, aim: float, *, by_layer: bool) -> Tuned:
        calibration, held_out = self.calibration.mean(form, shares), self.held_out.mean(form, shares)
        attention = self.attention.mean(form, shares)
        return Tuned(
            form=form,
            budget=budget,
            layer_budgets=shares if by_layer else None,
            aim=self.goal.gain(aim),
            calibration=self.goal.of(calibration),
            held_out=self.goal.of(held_out),
            recall=attention.recall,
            error=attention.error,
            kv_fraction=held_out.kv_fraction,
            holds=self._holds(form, shares),
        )

    def _holds(self, form: Form, shares: Shares) -> bool:
        return (
            self._gain(self.calibration.mean(form, shares)) >= self.target - ROUNDING
            and self._gap(form, shares) <= self.goal.tolerance
            and self.held_out.mean(form, shares).kv_fraction < 1
        )

    def _gain(self, point: Point) -> float:
        return self.goal.gain(self.goal.of(point))

    def _gap(self, form: Form, shares: Shares) -> float:
        """How far the gain on held-out queries is below the target."""
        return self.target - self._gain(self.held_out.mean(form, shares))

    def _option(self, point: Point) -> Option:
        return Option(point.kv_fraction, self._gain(point))

    def _coarse(self, form: Form, share: float) -> Point:
        return self.coarse.mean(form, self._same(share), self.sample)

    def _same(self, share: float) -> Shares:
        return dict.fromkeys(self.layers, share)

    def _measure(self, meter: Meter, settings: list[tuple[Form, Shares]]) -> None:
        meter.measure(settings, self._show(len(settings)))

    def _show(self, settings: int) -> Callable[[int, int], None]:
        self.rounds += 1
        stage = f"round {self.rounds} of some 20 ({settings} setting{'' if settings == 1 else 's'})"
        return lambda done, of: self.progress(stage, done, of)
