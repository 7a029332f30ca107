"""What tuning finds."""

from dataclasses import dataclass

from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.tuning.meter import Shares


@dataclass(frozen=True)
class Tuned:
    """One method's cheapest setting that holds the target, or the one that came nearest where none does.

    `budget` is a share of the middle, the mean of `layer_budgets` where there are any. `calibration` and `held_out` are
    the goal's measure on either half of the tail; `recall`, `error` and `kv_fraction` are of the held-out one.
    `aim` is the target it was searched with: a tighter one than was asked for, where the held-out queries wanted that.
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
