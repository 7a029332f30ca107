"""Sinks and tail alone: what is left when nothing of the middle is attended. The bound from below."""

from dataclasses import dataclass

import torch

from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.interface import Asked, Method, MiddleContext, Selection, Selector, register


@register("window")
@dataclass(frozen=True)
class Window(Method):
    """Chooses nothing, whatever the budget."""

    def prepare(self, context: MiddleContext) -> "WindowSelector":
        """Allocates nothing."""
        return WindowSelector()


class WindowSelector(Selector):
    """No state."""

    def select(self, asked: Asked, budget: Budget) -> Selection:
        """One empty run."""
        Hk, _, Q, _ = asked.query.shape
        nothing = torch.zeros(Hk, 1 if asked.shared else Q, 1, dtype=torch.int64, device=asked.query.device)
        return Selection(nothing, nothing, 0, 0.0)
