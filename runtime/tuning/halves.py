"""The two halves of the tail's queries, as a goal measures them: what is chosen on one is verified on the other."""

from collections.abc import Callable

import torch

from sparsekv.formats.reader import Artifact
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.tuning.goals import Goal
from sparsekv.runtime.tuning.meter import AttentionMeter, Meter, Point, Shares
from sparsekv.runtime.tuning.tuned import Tuned

ROUNDING = 1e-12

Progress = Callable[[str, int, int], None]


class Halves:
    """Measures settings on the calibration and the held-out queries, each setting once.

    Args:
        progress: called with a round's name, the number of layers or settings done, and the total.
        device: where attention is measured.
    """

    def __init__(self, artifact: Artifact, goal: Goal, progress: Progress, device: torch.device):
        self.goal, self.progress, self.rounds = goal, progress, 0
        self.target = goal.gain(goal.value)
        self.layers = artifact.manifest.indexed_layers
        self.calibration, self.held_out = goal.meters(artifact, device)
        self.attention = (
            self.held_out
            if isinstance(self.held_out, AttentionMeter)
            else AttentionMeter(artifact, goal.reference, calibration=False, device=device)
        )

    def measure(self, meter: Meter, settings: list[tuple[Form, Shares]]) -> None:
        """Measure settings with one of the meters, as a round of its own."""
        meter.measure(settings, self.round(len(settings)))

    def round(self, settings: int) -> Callable[[int, int], None]:
        """The progress of the next round, over so many settings."""
        self.rounds += 1
        stage = f"round {self.rounds} of some 20 ({settings} setting{'' if settings == 1 else 's'})"
        return lambda done, of: self.progress(stage, done, of)

    def everywhere(self, share: float) -> Shares:
        """The same share for all layers."""
        return dict.fromkeys(self.layers, share)

    def gain(self, form: Form, shares: Shares) -> float:
        """The goal's gain on the calibration queries."""
        return self.gain_at(self.calibration.mean(form, shares))

    def gain_at(self, point: Point) -> float:
        """The goal's gain at a measured point."""
        return self.goal.gain(self.goal.of(point))

    def gap(self, form: Form, shares: Shares) -> float:
        """How far the gain on held-out queries is below the target."""
        return self.target - self.gain_at(self.held_out.mean(form, shares))

    def holds(self, form: Form, shares: Shares) -> bool:
        """Whether a setting meets the goal on both halves and reads less than everything."""
        return (
            self.gain(form, shares) >= self.target - ROUNDING
            and self.gap(form, shares) <= self.goal.tolerance
            and self.held_out.mean(form, shares).kv_fraction < 1
        )

    def as_it_is(self, form: Form, config: DecodeConfig) -> Tuned:
        """A setting that was not searched for, as measured on both halves."""
        shares = {layer: config.budget_of(layer).value for layer in self.layers}
        for meter in {id(one): one for one in (self.calibration, self.held_out, self.attention)}.values():
            self.measure(meter, [(form, shares)])
        return self.tuned(form, config.budget.value, shares, self.target, by_layer=bool(config.layer_budgets))

    def tuned(self, form: Form, budget: float, shares: Shares, aim: float, *, by_layer: bool) -> Tuned:
        """What both halves say of a setting, which was searched for with the gain `aim`."""
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
