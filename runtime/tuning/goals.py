"""Goals and results of a tuning search.

The search chooses settings on the first half of the tail's queries, and checks them on the second half.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import TuneTarget
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.selection.interface import Budget, MethodSpec
from sparsekv.runtime.tuning.meter import AttentionMeter, Meter, ModelMeter, Point, Shares

if TYPE_CHECKING:  # the module imports transformers, which only perplexity needs
    from sparsekv.runtime.decoding.open import OpenIndex


@dataclass(frozen=True)
class Tuned:
    """A measured setting, such as a method's cheapest that meets the goal, or nearest to the goal if none meets it.

    Attributes:
        form: the method with its parameters.
        budget: share of the tokens between sinks and tail; the mean of `layer_budgets` if these are set.
        layer_budgets: a budget for each layer; None: all layers have the same budget.
        aim: the value of the goal's measure that the search aimed at on the tail's first half. It is stricter than the
            goal if an earlier setting missed the goal on the tail's second half.
        calibration: the goal's measure on the first half of the tail's queries, by which settings are chosen.
        held_out: the goal's measure on the second half of the tail's queries.
        recall, error, kv_fraction: recall, output error and KV fraction on the second half of the tail's queries.
        holds: whether the setting meets the goal on both halves, as `Halves.holds` defines it.
        step_ms: milliseconds of a decode step of one layer. None if times are not compared, or if the setting was
            searched and misses the goal.
    """

    form: MethodSpec
    budget: float
    layer_budgets: Shares | None
    aim: float
    calibration: float
    held_out: float
    recall: float
    error: float
    kv_fraction: float
    holds: bool
    step_ms: float | None = None

    @property
    def cost(self) -> float:
        """Cost that tuning minimises: `step_ms` if it was measured, else the KV fraction."""
        return self.kv_fraction if self.step_ms is None else self.step_ms


REFERENCE = Budget(0.05)
ROUGH_ERROR = 0.05
"""Output error at which the coarse search compares a method's variants if the goal is the model's perplexity."""


@dataclass(frozen=True)
class Goal(ABC):
    """Bound `value` on one measure of a setting: recall, output error or perplexity.

    Recall is the share of the oracle's tokens at the budget `reference` that a setting selects. Raises UsageError for a
    `value` out of range: for perplexity, not finite and above 1; otherwise, not between 0 and 1.
    """

    measure: ClassVar[str]
    """Name of the field of `Point` that the goal bounds."""
    bound: ClassVar[str] = "at most"
    beside: ClassVar[str] = "recall"
    """Name of the second measure in the table of settings."""
    residual: ClassVar[bool] = True
    """Whether a residual can help to meet the goal."""
    outputs: ClassVar[bool] = True
    """Whether the search needs attention outputs on the tail's first half. On the second half they are always computed,
    because the table of settings has their error."""
    precision: ClassVar[float] = 1.03
    """Ratio at which the search ends: the smallest budget that meets the goal to the largest budget that misses it."""

    value: float
    reference: Budget = REFERENCE

    @property
    @abstractmethod
    def tolerance(self) -> float:
        """Largest amount by which the gain on the tail's second half may be below the gain of `value`."""

    def meters(self, artifact: Artifact, device: torch.device) -> tuple[Meter, Meter]:
        """Return a meter for the tail's first half (calibration) and a meter for its second half (held out).

        Meters that measure attention compute on `device`.
        """
        chosen_on = AttentionMeter(artifact, self.reference, calibration=True, outputs=self.outputs, device=device)
        return chosen_on, AttentionMeter(artifact, self.reference, calibration=False, device=device)

    def gain(self, value: float) -> float:
        """Convert a value of the goal's measure to a gain, for which larger is better."""
        return -value

    def of(self, point: Point) -> float:
        """Return the value of the goal's measure in a point."""
        return float(getattr(point, self.measure))

    def rough(self) -> "Goal":
        """Return the goal of the coarse search: this goal, or a bound on output error instead of perplexity."""
        return self

    def target(self) -> TuneTarget:
        """Return the goal as it is stored in a manifest."""
        return TuneTarget(measure=self.measure, value=self.value)

    def __str__(self) -> str:
        return f"{self.measure} of {self.bound} {self.value:g}"

    def __post_init__(self) -> None:
        if not 0 < self.value < 1:
            raise UsageError(f"--target-{self.measure} {self.value:g}: give a share between 0 and 1, such as 0.9")


@dataclass(frozen=True)
class RecallGoal(Goal):
    """Lower bound on recall, the share of the oracle's tokens at the budget `reference` that a setting selects."""

    measure = "recall"
    bound = "at least"
    beside = "error"
    residual = False  # recall counts chosen tokens, so centroids of the unselected tokens would only add cost
    outputs = False

    @property
    def tolerance(self) -> float:
        return 0.02

    def gain(self, value: float) -> float:
        return value

    def target(self) -> TuneTarget:
        return TuneTarget(measure=self.measure, value=self.value, of=self.reference.value)

    def __str__(self) -> str:
        return f"recall of the oracle's best {self.reference} of {self.bound} {self.value:g}"


@dataclass(frozen=True)
class ErrorGoal(Goal):
    """Upper bound on the relative error of the attention output."""

    measure = "error"

    @property
    def tolerance(self) -> float:
        return 0.1 * self.value


@dataclass(frozen=True)
class PerplexityGoal(Goal):
    """Upper bound, above 1, on the model's perplexity on the document's tail, divided by that of dense attention."""

    measure = "perplexity"
    beside = "error"
    precision = 1.2  # perplexity over about a hundred tokens cannot distinguish closer budgets

    open_model: Callable[[], "OpenIndex"] = field(kw_only=True)

    def __post_init__(self) -> None:
        if not 1 < self.value < math.inf:
            raise UsageError(f"--target-perplexity {self.value:g}: give a ratio above 1, such as 1.02")

    @property
    def tolerance(self) -> float:
        return 0.25 * (self.value - 1)

    def meters(self, artifact: Artifact, device: torch.device) -> tuple[Meter, Meter]:
        index = self.open_model()
        return ModelMeter(index, calibration=True), ModelMeter(index, calibration=False)

    def rough(self) -> Goal:
        return ErrorGoal(ROUGH_ERROR, self.reference)

    def __str__(self) -> str:
        return f"perplexity of {self.bound} {self.value:g} times dense attention's"


ROUNDING = 1e-12

Progress = Callable[[str, int, int], None]


class Halves:
    """Measures settings on both halves of the tail's queries: the first (calibration) and the second (held out).

    Args:
        progress: called with a round's name, the number of layers or settings measured so far, and their total.
        device: the device that computes attention.
    """

    def __init__(self, artifact: Artifact, goal: Goal, progress: Progress, device: torch.device):
        self.goal, self.progress, self.rounds = goal, progress, 0
        self.target = goal.gain(goal.value)
        self.layers, self.middle = artifact.manifest.indexed_layers, artifact.manifest.split.middle
        self.calibration, self.held_out = goal.meters(artifact, device)
        self.attention = (
            self.held_out
            if isinstance(self.held_out, AttentionMeter)
            else AttentionMeter(artifact, goal.reference, calibration=False, device=device)
        )

    def measure(self, meter: Meter, settings: list[tuple[MethodSpec, Shares]]) -> None:
        """Measure settings with a meter. The progress shows the measurement as a new round."""
        meter.measure(settings, self.round(len(settings)))

    def round(self, settings: int) -> Callable[[int, int], None]:
        """Begin the next round, which measures `settings` settings; return its progress callback."""
        self.rounds += 1
        stage = f"round {self.rounds} of some 20 ({settings} setting{'' if settings == 1 else 's'})"
        return lambda done, of: self.progress(stage, done, of)

    def everywhere(self, share: float) -> Shares:
        """Return a budget for each layer, all equal to `share`."""
        return dict.fromkeys(self.layers, share)

    def gain(self, form: MethodSpec, shares: Shares) -> float:
        """Return the gain of a measured setting on the tail's first half."""
        return self.gain_at(self.calibration.mean(form, shares))

    def gain_at(self, point: Point) -> float:
        return self.goal.gain(self.goal.of(point))

    def gap(self, form: MethodSpec, shares: Shares) -> float:
        """Return the target minus the gain of a measured setting on the tail's second half."""
        return self.target - self.gain_at(self.held_out.mean(form, shares))

    def holds(self, form: MethodSpec, shares: Shares) -> bool:
        """Whether a setting meets the goal on both halves of the tail's queries, at a KV fraction below 1.

        On the second half the gain may be below the target by the tolerance.
        """
        return (
            self.gain(form, shares) >= self.target - ROUNDING
            and self.gap(form, shares) <= self.goal.tolerance
            and self.held_out.mean(form, shares).kv_fraction < 1
        )

    def as_it_is(self, form: MethodSpec, config: DecodeConfig) -> Tuned:
        """Measure a config's setting, with one variant `form` of a method, on both halves. No search follows."""
        shares = {layer: self._share(config.budget_of(layer)) for layer in self.layers}
        for meter in {id(one): one for one in (self.calibration, self.held_out, self.attention)}.values():
            self.measure(meter, [(form, shares)])
        return self.tuned(form, self._share(config.budget), shares, self.target, by_layer=bool(config.layer_budgets))

    def _share(self, budget: Budget) -> float:
        return float(budget.value) if budget.is_share else budget.share(self.middle)

    def tuned(self, form: MethodSpec, budget: float, shares: Shares, aim: float, *, by_layer: bool) -> Tuned:
        """Return a measured setting as a result; `aim` is the gain that the search aimed at."""
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
            holds=self.holds(form, shares),
        )
