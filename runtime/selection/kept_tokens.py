"""One ranking of the middle's tokens that every step takes the best of: what methods that evict share."""

import torch

from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.interface import Asked, Selection, Selector


def ranking(scores: torch.Tensor) -> torch.Tensor:
    """Tokens [..., M] by falling score [..., M]; equal ones in order of position."""
    return scores.argsort(dim=-1, descending=True, stable=True)


class KeptTokens(Selector):
    """order [Hk, M] int64: middle positions, best first.

    What is not kept need never be read, so that a choice reads nothing but what it keeps.
    """

    def __init__(self, order: torch.Tensor):
        self.order = order

    def select(self, asked: Asked, budget: Budget) -> Selection:
        """The same tokens for every query."""
        tokens = budget.tokens(self.order.shape[1])
        starts = self.order[:, None, :tokens].expand(-1, 1 if asked.shared else asked.query.shape[2], -1)
        return Selection(starts, torch.ones_like(starts), tokens, 0.0)
