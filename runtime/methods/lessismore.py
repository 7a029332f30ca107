"""LessIsMore (arXiv 2508.07101): like TidalDecode, with one selection for all heads that includes recent tokens.

By default, a quarter of the budget goes to the most recent tokens. The rest of the budget is filled from the rankings
of all query heads in turn: the best token of each head, then the second best token of each head, and so on. Each token
counts once.

There are two differences from the published code. The most recent tokens are the middle's last tokens, because the tail
is always attended to. Recent tokens are removed after the heads' rankings are merged, not before, so that one merged
ranking serves every budget.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.kernels.scores.logits import attention_logits, softmax_beside
from sparsekv.runtime.selection.interface import MiddleContext, Queries, methods
from sparsekv.runtime.selection.token_choice import LayerSharing, SharingSelector, ranking


@methods.register("lessismore")
@dataclass(frozen=True)
class LessIsMore(LayerSharing):
    """Attends to recent tokens and to the tokens that an earlier layer ranks highest by merging all heads' rankings."""

    merges_heads: ClassVar[bool] = True
    recent_share: float = field(
        default=0.25, metadata={"help": "Share of the budget that is spent on the document's last tokens."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.recent_share <= 1:
            raise UsageError(f"--recent-share {self.recent_share:g}: give a share from 0 to 1")

    def prepare(self, context: MiddleContext) -> "LessIsMoreSelector":
        """Create the selector of a layer.

        A selection in a ranking layer allocates a few tensors of the size of all query heads' logits on all M keys.
        """
        return LessIsMoreSelector(self, context, self.recent_share)


class LessIsMoreSelector(SharingSelector):
    """Ranks each token by its best rank among all query heads."""

    def __init__(self, method: LayerSharing, context: MiddleContext, recent_share: float):
        super().__init__(method, context, "lessismore")
        self.recent_share = recent_share

    def rank(self, queries: Queries) -> torch.Tensor:
        logits = attention_logits(queries.query, self.keys, *self.facts.scaling)
        if queries.joint:
            logits = softmax_beside(logits, queries.exact_logsumexp()).mean(2, keepdim=True)
        orders = ranking(logits.flatten(0, 1))
        # In a round robin over the heads' rankings, the token of rank r in head h has the turn r * heads + h.
        of_first = len(orders) * torch.arange(orders.shape[-1], dtype=torch.int32, device=orders.device)
        turns = torch.empty_like(orders, dtype=torch.int32).scatter_(-1, orders, of_first.expand_as(orders))
        turns += torch.arange(len(orders), dtype=torch.int32, device=orders.device)[:, None, None]
        return turns.amin(0, keepdim=True).argsort(-1)

    def best(self, order: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the most recent tokens, followed by the best of the other tokens: `tokens` tokens in all."""
        # The product is rounded first, because 10 * (1 - 0.8) is slightly less than 2.
        middle, others = order.shape[-1], int(round(tokens * (1 - self.recent_share), 6))
        if self.recent_share < 1:
            others = max(1, others)
        oldest_recent = middle - (tokens - others)
        # At most `tokens - others` of the first `tokens` in the ranking are recent, and so at least `others` are older.
        first = order[..., :tokens]
        old_first = (first >= oldest_recent).int().argsort(dim=-1, stable=True)
        recent = torch.arange(oldest_recent, middle, dtype=order.dtype, device=order.device)
        return torch.cat([recent.expand(*order.shape[:-1], -1), first.gather(-1, old_first)[..., :others]], -1)
