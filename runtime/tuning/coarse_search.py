"""Search for the cheapest setting: a coarse search on samples of layers and queries, a fine search on all layers."""

import math
from dataclasses import dataclass, field

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.runtime.decoding.prepare import residual_source
from sparsekv.runtime.reporting.report import forms
from sparsekv.runtime.selection.interface import MethodSpec, methods
from sparsekv.runtime.selection.registry import methods_of
from sparsekv.runtime.tuning.goals import AttentionMeter, Halves, Point, Tuned

# Smallest and largest budget, as a share of the tokens between sinks and tail. The smallest budget is about six tokens
# of a short document. Above the largest budget, selection saves nothing.
SMALLEST_BUDGET, LARGEST_BUDGET = 0.001, 0.95


@dataclass
class BudgetSearch:
    """Search for the smallest budget whose gain (the goal's measure, larger is better) reaches a target.

    The gain should mostly rise with the budget, which is a share of the tokens between sinks and tail. The search
    multiplies or divides the budget `start` by growing factors until one budget reaches the target and a smaller budget
    misses it. Then it interpolates between both until the larger budget is at most `ratio` times the smaller one. The
    search ends early at SMALLEST_BUDGET or LARGEST_BUDGET, or at a budget whose gain is at most `slack` above the
    target. Callers may change the target between two proposals, because measured gains do not depend on the target.

    Attributes:
        step: smallest factor between the first budgets.
        gains: measured gain of each budget.
    """

    target: float
    start: float
    step: float
    ratio: float
    slack: float = 0.0
    gains: dict[float, float] = field(default_factory=dict)

    @property
    def high(self) -> float | None:
        """The smallest measured budget whose gain reaches `target`; None if there is none."""
        return min((share for share, gain in self.gains.items() if gain >= self.target), default=None)

    @property
    def best(self) -> float:
        """The smallest measured budget that reaches the target; if none does, the one with the largest gain."""
        return max(self.gains, key=self.gains.__getitem__) if self.high is None else self.high

    @property
    def low(self) -> float | None:
        """The largest measured budget whose gain misses `target`. If there is a `high`, only smaller budgets count.

        None if there is no such budget.
        """
        high = self.high
        failing = (share for share, gain in self.gains.items() if gain < self.target)
        return max((share for share in failing if high is None or share < high), default=None)

    def propose(self) -> float | None:
        """Return the budget to measure next; None when the search is done."""
        share = rounded(self._next())
        return None if share in self.gains or self._is_close() else share

    def guess(self) -> float:
        """Interpolate the budget that just reaches the target between `low` and `high`; `best` if either is None."""
        low, high = self.low, self.high
        return self.best if low is None or high is None else self._between(low, high)

    def _is_close(self) -> bool:
        low, high = self.low, self.high
        if high is not None and self.slack and self.gains[high] <= self.target + self.slack:
            return True
        return low is not None and high is not None and high / low <= self.ratio

    def _next(self) -> float:
        low, high = self.low, self.high
        if low is not None and high is not None:
            return self._between(low, high)
        if not self.gains:
            return self.start
        stride = max(self.step, (max(self.gains) / min(self.gains)) ** 2)
        return max(self.gains) * stride if high is None else high / stride

    def _between(self, low: float, high: float) -> float:
        """Interpolate a budget on a log scale, in the inner half of the interval from `low` to `high`."""
        below, above = self.gains[low], self.gains[high]
        part = (self.target - below) / (above - below)
        return low * math.pow(high / low, min(0.75, max(0.25, part)))


def rounded(share: float) -> float:
    """Return a budget clamped to SMALLEST_BUDGET and LARGEST_BUDGET, and rounded up to three significant digits.

    A budget that is rounded down might no longer reach the target.
    """
    share = min(LARGEST_BUDGET, max(SMALLEST_BUDGET, share))
    digits = 2 - math.floor(math.log10(share))
    scale = math.pow(10, digits)
    return math.ceil(round(share * scale, 6)) / scale


@dataclass
class Candidate:
    """A variant of a method whose budget is searched on all layers.

    `hopeless` is True if no variant of the method met the goal on the sample of layers and queries. It is always False
    for a goal on perplexity, because samples do not have a perplexity. A hopeless variant is measured at one budget
    only. `raised` is the number of times that the target was raised.
    """

    form: MethodSpec
    search: BudgetSearch
    hopeless: bool
    raised: int = 0

    def propose(self) -> float | None:
        """Return the budget to measure next; None when the search is done."""
        return None if self.hopeless and self.search.gains else self.search.propose()


def candidates(artifact: Artifact, names: list[str], *, residual: bool) -> list[MethodSpec]:
    """Return all variants of the named methods; without names, of all methods that can run on the index.

    Args:
        residual: also return variants with a residual, as `forms` does, if the index has value centroids.

    Raises:
        UsageError: a method cannot run, or is a bound such as the oracle.
    """
    known = methods()
    for name in names:
        if name in known and known[name].is_bound:
            raise UsageError(f"--method {name}: this is only an upper bound for other methods; choose another method")
    chosen = [name for name in methods_of(artifact, names) if not known[name].is_bound]
    residual = residual and _has_centroids(artifact)
    return [form for name in chosen for form in forms(artifact, name, residual=residual)]


def _has_centroids(artifact: Artifact) -> bool:
    try:
        residual_source(artifact)
    except UsageError:
        return False
    return True


CONTENDERS, CONTENDING_WITHIN = 2, 1.25
"""Maximum number of settings that are searched more closely, and maximum ratio of the KV fraction of such a setting to
the smallest KV fraction of all settings."""
RAISES = 2
"""Maximum number of times that a target is raised when the held-out queries miss the target."""


class FineSearch:
    """Search on all layers for each candidate's smallest budget that meets the goal."""

    def __init__(self, halves: Halves, found: list[Candidate]):
        self.halves, self.found = halves, found

    def run(self) -> list[Candidate]:
        """Search all candidates, then search the `contenders` among them more closely; return these contenders."""
        self._verified(self.found)
        contenders = self.contenders(self.found)
        for one in contenders:
            one.search.ratio = one.search.step = self.halves.goal.precision
            one.search.slack = 0.0
        self._verified(contenders)
        return contenders

    def contenders(self, found: list[Candidate]) -> list[Candidate]:
        """Return the candidates of smallest KV fraction among those that meet the target.

        At most CONTENDERS candidates are returned, with at most CONTENDING_WITHIN times the smallest KV fraction.
        """
        held_out = self.halves.held_out
        costs = [
            (held_out.mean(one.form, shares).kv_fraction, one)
            for one in found
            if self.halves.holds(one.form, shares := self.halves.everywhere(one.search.best))
        ]
        costs = sorted(costs, key=lambda of: of[0])[:CONTENDERS]
        return [one for cost, one in costs if cost <= CONTENDING_WITHIN * costs[0][0]]

    def settings(self) -> list[Tuned]:
        """Return each candidate's setting with one budget for all layers, and measure its recall and error."""
        shares = [(one.form, self.halves.everywhere(one.search.best)) for one in self.found]
        self.halves.measure(self.halves.attention, shares)
        return [uniform(self.halves, one) for one in self.found]

    def _verified(self, found: list[Candidate]) -> None:
        """Search candidates and measure them on held-out queries.

        A candidate that misses the goal on held-out queries by more than the tolerance is searched again, at most
        RAISES times. Its new target is the gain that it reached on the tail's first half plus the amount by which it
        missed the goal on the second half. A hopeless candidate, and one that has not reached its target on the first
        half, is not searched again.
        """
        self._search(found)
        while found:
            best = [(one.form, self.halves.everywhere(one.search.best)) for one in found]
            self.halves.measure(self.halves.held_out, best)
            found = [one for one in found if self._raise(one)]
            self._search(found)

    def _search(self, found: list[Candidate]) -> None:
        while wanted := [(one, share) for one in found if (share := one.propose()) is not None]:
            settings = [(one.form, self.halves.everywhere(share)) for one, share in wanted]
            self.halves.measure(self.halves.calibration, settings)
            for (one, share), (form, shares) in zip(wanted, settings, strict=True):
                one.search.gains[share] = self.halves.gain(form, shares)

    def _raise(self, one: Candidate) -> bool:
        gap = self.halves.gap(one.form, self.halves.everywhere(one.search.best))
        hopeless = one.search.high is None or one.raised == RAISES or one.hopeless
        if gap <= self.halves.goal.tolerance or hopeless:
            return False
        # The gap is added to the measured gain, which may exceed the old target by more than the gap.
        one.search.target = one.search.gains[one.search.best] + gap
        one.raised += 1
        return True


def uniform(halves: Halves, one: Candidate) -> Tuned:
    """Return a candidate's setting with one budget for all layers, and its measures on both halves of the tail."""
    share = one.search.best
    return halves.tuned(one.form, share, halves.everywhere(share), one.search.target, by_layer=False)


LAYER_STRIDE, QUERY_STRIDE = 3, 2
COARSE_START, COARSE_STEP, COARSE_RATIO = 0.1, 4.0, 1.3
FINE_STEP, FINE_RATIO = 1.2, 1.2
FORMS_KEPT, KEPT_WITHIN = 2, 1.05
"""Maximum number of a method's variants that are searched on all layers, and maximum ratio of the KV fraction of such a
variant to the smallest KV fraction of the method's variants."""


class CoarseSearch:
    """Search over all variants on samples of layers and queries, to find each method's cheapest variants."""

    def __init__(self, artifact: Artifact, halves: Halves, device: torch.device):
        self.halves, self.goal, self.rough = halves, halves.goal, halves.goal.rough()
        self.sample = halves.layers[::LAYER_STRIDE]
        self.meter = AttentionMeter(
            artifact,
            self.goal.reference,
            calibration=True,
            stride=QUERY_STRIDE,
            outputs=self.rough.outputs,
            device=device,
        )

    def promising(self, forms: list[MethodSpec]) -> list[Candidate]:
        """Return each method's cheapest variants that meet the target on the sample.

        If none of a method's variants meets the target, the variant of largest gain is returned.
        """
        searches = self._searched(forms)
        by_method: dict[str, dict[MethodSpec, BudgetSearch]] = {}
        for form, search in searches.items():
            by_method.setdefault(form.name, {})[form] = search
        return [one for of_method in by_method.values() for one in self._best(of_method)]

    def _searched(self, forms: list[MethodSpec]) -> dict[MethodSpec, BudgetSearch]:
        # The search aims slightly above the target, so that the first budget on all layers mostly meets the target.
        target = self.rough.gain(self.rough.value) + self.rough.tolerance / 2
        searches = {form: BudgetSearch(target, COARSE_START, COARSE_STEP, COARSE_RATIO) for form in forms}
        while wanted := self._wanted(searches):
            settings = [(form, self.halves.everywhere(share)) for form, share in wanted]
            self.meter.measure(settings, self.halves.round(len(settings)), self.sample)
            for form, share in wanted:
                searches[form].gains[share] = self.rough.gain(self.rough.of(self._at(form, share)))
        return searches

    def _wanted(self, searches: dict[MethodSpec, BudgetSearch]) -> list[tuple[MethodSpec, float]]:
        """Return the next budget to measure for each variant that is still searched.

        Let `best` be the smallest KV fraction at which any variant of the method meets the target so far. A variant is
        dropped once it misses the target at a KV fraction of KEPT_WITHIN * `best` or more, because `_best` would not
        keep it.
        """
        best: dict[str, float] = {}
        for form, search in searches.items():
            if search.high is not None:
                best[form.name] = min(best.get(form.name, 1.0), self._at(form, search.high).kv_fraction)
        wanted = []
        for form, search in searches.items():
            failing = 0.0 if search.low is None else self._at(form, search.low).kv_fraction
            share = search.propose()
            if share is not None and failing < KEPT_WITHIN * best.get(form.name, 1.0):
                wanted.append((form, share))
        return wanted

    def _best(self, of_method: dict[MethodSpec, BudgetSearch]) -> list[Candidate]:
        """Choose the candidates among one method's variants."""
        costs = {
            form: self._at(form, high).kv_fraction
            for form, search in of_method.items()
            if (high := search.high) is not None
        }
        order = sorted(costs, key=lambda form: costs[form])[:FORMS_KEPT]
        order = [form for form in order if costs[form] <= KEPT_WITHIN * costs[order[0]]]
        most = {form: max(search.gains.values()) for form, search in of_method.items()}
        hopeless = self.rough is self.goal and max(most.values()) < self.halves.target
        return [
            Candidate(form, self._fine(of_method[form]), hopeless)
            for form in order or [max(most, key=lambda form: most[form])]
        ]

    def _fine(self, coarse: BudgetSearch) -> BudgetSearch:
        return BudgetSearch(self.halves.target, coarse.guess(), FINE_STEP, FINE_RATIO, self.goal.tolerance)

    def _at(self, form: MethodSpec, share: float) -> Point:
        return self.meter.mean(form, self.halves.everywhere(share), self.sample)
