"""Goals and results of a tuning search, and the meters that measure settings.

The search chooses settings on the first half of the tail's queries, and checks them on the second half. A meter
measures settings on one half, by attention or by perplexity.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import CPU, Artifact
from sparsekv.formats.index.schema import TuneTarget
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.reporting.recall import MeasuredSetting, QueryBlock, SharedStates, measure_layer, tail_block
from sparsekv.runtime.selection.interface import Budget, MethodSpec

if TYPE_CHECKING:  # the module imports transformers, which only perplexity needs
    from sparsekv.runtime.decoding.open import OpenIndex


@dataclass(frozen=True)
class Point:
    """Measures of a setting: KV fraction, recall and output error as means over KV heads and queries, and perplexity.

    `perplexity` is divided by the perplexity of dense attention. A measure that the meter does not compute is NaN.
    """

    kv_fraction: float
    recall: float = math.nan
    error: float = math.nan
    perplexity: float = math.nan


Shares = dict[int, float]
"""Budget of each indexed layer, by layer number, as a share of the tokens between sinks and tail."""
MeterProgress = Callable[[int, int], None]


class AttentionMeter:
    """Measures each layer's attention, compared with dense attention, on one half of the tail's queries.

    Args:
        reference: recall is the share of the oracle's tokens at this budget that a setting selects.
        calibration: measure on the tail's first half; False: on the held-out second half.
        stride: measure every `stride`-th query.
        outputs: also measure the error of attention's output.
    """

    def __init__(
        self,
        artifact: Artifact,
        reference: Budget,
        *,
        calibration: bool,
        stride: int = 1,
        outputs: bool = True,
        device: torch.device = CPU,
    ):
        self.artifact, self.calibration, self.stride, self.device = artifact, calibration, stride, device
        self.reference, self.outputs = reference, outputs
        self.layers = artifact.manifest.indexed_layers
        self.shared: set[MethodSpec] = set()
        """Variants whose layers share state. Such a variant is measured on all layers or on none."""
        self._known: dict[tuple[MethodSpec, float, int], Point] = {}

    def measure(
        self,
        settings: Iterable[tuple[MethodSpec, Shares]],
        progress: MeterProgress,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Measure variants of methods at each layer's budget, a share of the tokens between sinks and tail.

        Skips layers and budgets that were measured before. Needs the memory of one layer.

        Args:
            progress: called after each layer, also after a skipped one, with the number of layers so far and the total.
            layers: layers to measure; None: all. Variants whose layers share state are always measured on all layers.
        """
        states, asked = SharedStates(), self.layers if layers is None else layers
        settings = [
            (form, shares)
            for form, shares in settings
            if any((form, shares[layer], layer) not in self._known for layer in asked)
        ]
        for done, layer in enumerate(self.layers, 1):
            here = []
            for form, shares in settings:
                if states.get((form.name, form.variant)):
                    self.shared.add(form)
                if form in self.shared or (layer in asked and (form, shares[layer], layer) not in self._known):
                    here.append((form, shares[layer]))
            self._measure_layer(layer, list(dict.fromkeys(here)), states)
            progress(done, len(self.layers))

    def mean(self, form: MethodSpec, shares: Shares, layers: Sequence[int] | None = None) -> Point:
        """Return the measures of a measured setting, as means over `layers`; None: over all layers."""
        points = [self.at(form, shares[layer], layer) for layer in layers or self.layers]
        return Point(*(fmean(values) for values in zip(*map(astuple, points), strict=True)))

    def at(self, form: MethodSpec, share: float, layer: int) -> Point:
        """Return the measures of a variant in one layer at a measured budget."""
        return self._known[form, share, layer]

    def _measure_layer(self, layer: int, here: list[tuple[MethodSpec, float]], states: SharedStates) -> None:
        if not here:
            return
        measured = {self._measured(form, share): (form, share) for form, share in here}
        rows, blocks = LayerRows(self.artifact, layer), [self._block(layer)]
        for one, measures in measure_layer(rows, list(measured), blocks, states, self.device).items():
            means = {name: float(values.mean()) for name, values in measures.means().items()}
            point = Point(means["kv_fraction"], means["recall"], means["output_error"])
            self._known[*measured[one], layer] = point

    def _measured(self, form: MethodSpec, share: float) -> MeasuredSetting:
        return MeasuredSetting(form, Budget(share), reference=self.reference, outputs=self.outputs)

    def _block(self, layer: int) -> QueryBlock:
        block = tail_block(self.artifact, layer, calibration=self.calibration)
        return replace(block, queries=block.queries[:, :: self.stride], visible=block.visible[:: self.stride])


class ModelMeter:
    """Measures the perplexity of one half of the tail by running the model, with a new cache for each setting.

    The tail is fed token by token, as in generation. A token is predicted from the sinks, the selected middle tokens
    and the earlier tail tokens. With `calibration`, the tail's first half is fed and its loss is counted. Otherwise the
    whole tail is fed, and the loss of its second half is counted.

    Raises:
        UsageError: the model has layers with a state. The tail's first token is predicted from the token before the
            tail, and an index need not store the state before that token.
    """

    def __init__(self, index: "OpenIndex", *, calibration: bool):
        split = index.split
        if index.artifact.manifest.states:
            raise UsageError(
                f"--target-perplexity: the model has layers with a state, and {index.artifact.folder} stores no state "
                "from which the beginning of its tail can be predicted; give --target-error or --target-recall"
            )
        self.index, self.after = index, split.sinks + split.middle
        tail, half = index.input_ids[self.after :], split.tail // 2
        self.fed = tail[:half] if calibration else tail
        self.counted = slice(0 if calibration else half, None)
        self.dense: float | None = None
        self._known: dict[tuple[MethodSpec, tuple[float, ...]], Point] = {}

    def measure(self, settings: Iterable[tuple[MethodSpec, Shares]], progress: MeterProgress) -> None:
        """Measure settings that were not measured before.

        Args:
            progress: called with the number of measured settings and the total.
        """
        new = [(form, shares) for form, shares in settings if (form, tuple(shares.values())) not in self._known]
        for done, (form, shares) in enumerate(new, 1):
            self._known[form, tuple(shares.values())] = self._measured(form, shares)
            progress(done, len(new))

    def mean(self, form: MethodSpec, shares: Shares) -> Point:
        return self._known[form, tuple(shares.values())]

    def _measured(self, form: MethodSpec, shares: Shares) -> Point:
        from sparsekv.runtime.decoding.perplexity import losses  # the module imports transformers

        if self.dense is None:
            whole = losses(self.index, self.index.dense_cache(self.after), self.fed, self.after)
            self.dense = float(whole[self.counted].mean())
        budgets = {layer: Budget(share) for layer, share in shares.items()}
        first = next(iter(budgets.values()))
        cache = self.index.cache(DecodeConfig(form, first, budgets), tail=False)
        found = losses(self.index, cache, self.fed, self.after)[self.counted].mean()
        return Point(kv_fraction=cache.kv_fraction(), perplexity=float((found - self.dense).exp()))


Meter = AttentionMeter | ModelMeter
"""Meter of settings on one half of the tail."""


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

    Recall is the share of the oracle's tokens at the budget `reference` that a setting selects. A bound on perplexity
    must be finite and above 1, and any other bound between 0 and 1; otherwise UsageError is raised.
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
    """Ratio of two budgets at which the search ends: the smallest that meets the goal to the largest that misses it."""

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
        """Measure the method `form` at a config's budgets on both halves, without a search; return the setting."""
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
