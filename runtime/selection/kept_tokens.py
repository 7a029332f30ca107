"""Selection by one fixed ranking of the middle's tokens, for all steps: shared by the eviction methods."""

import torch

from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.interface import Selector
from sparsekv.runtime.selection.queries import Queries
from sparsekv.runtime.selection.selection import Cost, Selection, single_rows


def ranking(scores: torch.Tensor) -> torch.Tensor:
    """Tokens [..., M] by descending score [..., M]; ties in order of position."""
    return scores.argsort(dim=-1, descending=True, stable=True)


class KeptTokens(Selector):
    """Selects the first tokens of a fixed ranking: order [Hk, M] int64, middle positions, best first.

    Selecting reads no index rows.
    """

    def __init__(self, order: torch.Tensor):
        self.order = order

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """The same tokens for every query."""
        tokens = budget.tokens(self.order.shape[1])
        starts = self.order[:, None, :tokens].expand(-1, 1 if queries.joint else queries.query.shape[2], -1)
        return Selection(single_rows(starts), Cost(0.0))
