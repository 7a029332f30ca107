"""One ranking of the middle's tokens that every step takes the best of: what methods that evict share."""

import torch

from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.interface import Selector
from sparsekv.runtime.selection.queries import Queries
from sparsekv.runtime.selection.selection import Cost, Selection, single_rows


def ranking(scores: torch.Tensor) -> torch.Tensor:
    """Tokens [..., M] by falling score [..., M]; equal ones in order of position."""
    return scores.argsort(dim=-1, descending=True, stable=True)


class KeptTokens(Selector):
    """order [Hk, M] int64: middle positions, best first.

    What is not kept need never be read, so that a choice reads nothing but what it keeps.
    """

    def __init__(self, order: torch.Tensor):
        self.order = order

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """The same tokens for every query."""
        tokens = budget.tokens(self.order.shape[1])
        starts = self.order[:, None, :tokens].expand(-1, 1 if queries.joint else queries.query.shape[2], -1)
        return Selection(single_rows(starts), Cost(0.0))
