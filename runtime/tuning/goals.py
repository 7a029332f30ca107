"""What a setting is to hold: recall of the oracle's best tokens, an error of attention's output, or a perplexity."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from sparsekv.formats.errors import UsageError
from sparsekv.formats.reader import Artifact
from sparsekv.formats.schema import Target
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.tuning.meter import AttentionMeter, Meter, Point
from sparsekv.runtime.tuning.model_meter import ModelMeter

REFERENCE = Budget(0.05)
ROUGH_ERROR = 0.05
"""The error of attention by which the forms of a method are compared where a goal is about the model."""


@dataclass(frozen=True)
class Goal(ABC):
    """A bound on what is measured of a setting; `reference` is the budget whose best tokens recall is of."""

    measure: ClassVar[str]
    """A field of Point."""
    bound: ClassVar[str] = "at most"
    beside: ClassVar[str] = "recall"
    """What else a person is told of a setting that holds the goal."""
    residual: ClassVar[bool] = True
    """Whether centroids for what is not chosen can help."""
    outputs: ClassVar[bool] = True
    """Whether to compute attention's output on the way."""
    precision: ClassVar[float] = 1.03
    """To what factor the smallest budget that holds the goal can be told."""

    value: float
    reference: Budget = REFERENCE

    @property
    @abstractmethod
    def tolerance(self) -> float:
        """How far below a target a gain on other queries may lie."""

    @abstractmethod
    def meters(self, artifact: Artifact) -> tuple[Meter, Meter]:
        """What measures settings on the half that they are chosen on, and on the held-out one."""

    def gain(self, value: float) -> float:
        """More is better, whatever is measured."""
        return -value

    def of(self, point: Point) -> float:
        """What this goal is about."""
        return float(getattr(point, self.measure))

    def rough(self) -> "Goal":
        """The goal for attention by which the forms of a method are compared on a sample."""
        return self

    def target(self) -> Target:
        """What a manifest says of it."""
        return Target(measure=self.measure, value=self.value)

    def __str__(self) -> str:
        return f"{self.measure} of {self.bound} {self.value:g}"

    def _check_share(self) -> None:
        if not 0 < self.value < 1:
            raise UsageError(f"--target-{self.measure} {self.value:g}: give a share between 0 and 1")


@dataclass(frozen=True)
class RecallGoal(Goal):
    """At least this share of the oracle's best tokens at the reference budget is attended to."""

    measure = "recall"
    bound = "at least"
    beside = "error"
    residual = False  # recall is of what is chosen: centroids for the rest can only cost
    outputs = False

    def __post_init__(self) -> None:
        self._check_share()

    @property
    def tolerance(self) -> float:
        return 0.02

    def gain(self, value: float) -> float:
        return value

    def meters(self, artifact: Artifact) -> tuple[Meter, Meter]:
        chosen_on = AttentionMeter(artifact, self.reference, calibration=True, outputs=self.outputs)
        return chosen_on, AttentionMeter(artifact, self.reference, calibration=False)

    def target(self) -> Target:
        return Target(measure=self.measure, value=self.value, of=self.reference.value)

    def __str__(self) -> str:
        return f"recall of the oracle's best {self.reference} of {self.bound} {self.value:g}"


@dataclass(frozen=True)
class ErrorGoal(Goal):
    """Attention's output is wrong by at most this."""

    measure = "error"

    def __post_init__(self) -> None:
        self._check_share()

    @property
    def tolerance(self) -> float:
        return 0.1 * self.value

    def meters(self, artifact: Artifact) -> tuple[Meter, Meter]:
        halves = [AttentionMeter(artifact, self.reference, calibration=first) for first in (True, False)]
        return halves[0], halves[1]


@dataclass(frozen=True)
class PerplexityGoal(Goal):
    """The model's perplexity on the document's own tail is at most this many times dense attention's."""

    measure = "perplexity"
    beside = "error"
    precision = 1.2  # a hundred tokens tell no more

    open_model: Callable[[], OpenIndex] = field(kw_only=True)

    def __post_init__(self) -> None:
        if not 1 < self.value < math.inf:
            raise UsageError(f"--target-perplexity {self.value:g}: give a ratio above 1, such as 1.02")

    @property
    def tolerance(self) -> float:
        return 0.25 * (self.value - 1)

    def meters(self, artifact: Artifact) -> tuple[Meter, Meter]:
        index = self.open_model()
        return ModelMeter(index, calibration=True), ModelMeter(index, calibration=False)

    def rough(self) -> Goal:
        return ErrorGoal(ROUGH_ERROR, self.reference)

    def __str__(self) -> str:
        return f"perplexity of {self.bound} {self.value:g} times dense attention's"
