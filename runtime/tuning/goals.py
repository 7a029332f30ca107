"""Targets of a tuning search: recall of the oracle's best tokens, error of attention's output, or perplexity."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.reader import Artifact
from sparsekv.formats.schema import TuneTarget
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.tuning.meter import AttentionMeter, Meter, Point
from sparsekv.runtime.tuning.model_meter import ModelMeter

REFERENCE = Budget(0.05)
ROUGH_ERROR = 0.05
"""The output error at which a method's forms are compared first, where the goal is the model's perplexity."""


@dataclass(frozen=True)
class Goal(ABC):
    """A bound on one measure of a setting; recall counts the oracle's best tokens at the `reference` budget."""

    measure: ClassVar[str]
    """The name of a field of Point."""
    bound: ClassVar[str] = "at most"
    beside: ClassVar[str] = "recall"
    """A second measure to report to the user, of a setting that meets the goal."""
    residual: ClassVar[bool] = True
    """Whether a residual can help."""
    outputs: ClassVar[bool] = True
    """Whether attention outputs are computed in the search."""
    precision: ClassVar[float] = 1.03
    """The factor within which the smallest budget that meets the goal can be determined."""

    value: float
    reference: Budget = REFERENCE

    @property
    @abstractmethod
    def tolerance(self) -> float:
        """How far the gain on held-out queries may lie below the target."""

    @abstractmethod
    def meters(self, artifact: Artifact, device: torch.device) -> tuple[Meter, Meter]:
        """The meters for the half of the tail on which settings are chosen, and for the held-out half; attention is
        measured on `device`."""

    def gain(self, value: float) -> float:
        """A value of the measure as a gain: more is better."""
        return -value

    def of(self, point: Point) -> float:
        """The point's value of this goal's measure."""
        return float(getattr(point, self.measure))

    def rough(self) -> "Goal":
        """The goal, about attention, by which a method's forms are compared on a sample of layers."""
        return self

    def target(self) -> TuneTarget:
        """The goal as it is recorded in a manifest."""
        return TuneTarget(measure=self.measure, value=self.value)

    def __str__(self) -> str:
        return f"{self.measure} of {self.bound} {self.value:g}"

    def _check_share(self) -> None:
        if not 0 < self.value < 1:
            raise UsageError(f"--target-{self.measure} {self.value:g}: give a share between 0 and 1, such as 0.9")


@dataclass(frozen=True)
class RecallGoal(Goal):
    """At least this share of the oracle's best tokens at the reference budget is attended to."""

    measure = "recall"
    bound = "at least"
    beside = "error"
    residual = False  # recall counts chosen tokens, so centroids of the rest would only add cost
    outputs = False

    def __post_init__(self) -> None:
        self._check_share()

    @property
    def tolerance(self) -> float:
        return 0.02

    def gain(self, value: float) -> float:
        return value

    def meters(self, artifact: Artifact, device: torch.device) -> tuple[Meter, Meter]:
        chosen_on = AttentionMeter(artifact, self.reference, calibration=True, outputs=self.outputs, device=device)
        return chosen_on, AttentionMeter(artifact, self.reference, calibration=False, device=device)

    def target(self) -> TuneTarget:
        return TuneTarget(measure=self.measure, value=self.value, of=self.reference.value)

    def __str__(self) -> str:
        return f"recall of the oracle's best {self.reference} of {self.bound} {self.value:g}"


@dataclass(frozen=True)
class ErrorGoal(Goal):
    """The relative error of attention's output is at most this."""

    measure = "error"

    def __post_init__(self) -> None:
        self._check_share()

    @property
    def tolerance(self) -> float:
        return 0.1 * self.value

    def meters(self, artifact: Artifact, device: torch.device) -> tuple[Meter, Meter]:
        chosen_on, held_out = (
            AttentionMeter(artifact, self.reference, calibration=first, device=device) for first in (True, False)
        )
        return chosen_on, held_out


@dataclass(frozen=True)
class PerplexityGoal(Goal):
    """The model's perplexity on the document's own tail is at most this many times dense attention's."""

    measure = "perplexity"
    beside = "error"
    precision = 1.2  # a hundred tokens cannot resolve less

    open_model: Callable[[], OpenIndex] = field(kw_only=True)

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
