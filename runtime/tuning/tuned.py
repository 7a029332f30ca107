"""The result of tuning."""

from dataclasses import dataclass

from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.tuning.meter import Shares


@dataclass(frozen=True)
class Tuned:
    """One method's cheapest setting that meets the target, or the nearest one where none does.

    `budget` is a share of the middle, the mean of `layer_budgets` where there are any. `calibration` and `held_out` are
    the goal's measure on the two halves of the tail; `recall`, `error` and `kv_fraction` are of the held-out half.
    `aim` is the target of the search, tighter than the goal where held-out queries missed it. `step_ms` is the time of
    a decode step of one layer, None where times are not compared, and for a setting that misses the target.
    """

    form: Form
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
        """What makes it cheap: its time where that was measured, else what it reads."""
        return self.kv_fraction if self.step_ms is None else self.step_ms
