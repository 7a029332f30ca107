"""Attention to sinks, tail and new tokens, and to no token of the middle: a baseline that other methods should beat."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sparsekv.runtime.selection.interface import (
    Budget,
    Cost,
    Method,
    MiddleContext,
    Queries,
    RowSet,
    Selection,
    Selector,
    methods,
)


@methods.register("window")
@dataclass(frozen=True)
class Window(Method):
    """Selects nothing, for any budget."""

    ignores_budget: ClassVar[bool] = True

    def prepare(self, context: MiddleContext) -> "WindowSelector":
        """Create the selector of a layer, without allocations."""
        return WindowSelector()


class WindowSelector(Selector):
    """Selects nothing; has no state."""

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Return a selection of one empty run for each query, or for all queries that share a selection."""
        Hk, _, Q, _ = queries.query.shape
        nothing = torch.zeros(Hk, 1 if queries.joint else Q, 1, dtype=torch.int64, device=queries.query.device)
        return Selection(RowSet(nothing, nothing, 0), Cost(0.0))
