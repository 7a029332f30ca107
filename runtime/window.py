"""Sinks and tail alone: what is left when nothing of the middle is attended. The bound from below."""

from dataclasses import dataclass

import torch

from sparsekv.runtime.budget import Budget
from sparsekv.runtime.methods import ExactLogsumexp, Method, MiddleContext, Selection, Selector, register


@register("window")
@dataclass(frozen=True)
class Window(Method):
    """Chooses nothing, whatever the budget."""

    def prepare(self, context: MiddleContext) -> "WindowSelector":
        """Allocates nothing."""
        return WindowSelector()


class WindowSelector(Selector):
    """No state."""

    def select(
        self, query: torch.Tensor, budget: Budget, exact_logsumexp: ExactLogsumexp, *, shared: bool
    ) -> Selection:
        """One empty run."""
        nothing = torch.zeros(
            query.shape[0], 1 if shared else query.shape[2], 1, dtype=torch.int64, device=query.device
        )
        return Selection(nothing, nothing, 0, 0.0)
