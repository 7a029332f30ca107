"""LessIsMore (arXiv 2508.07101): as TidalDecode, with one choice for all heads of a layer, recent tokens always in it.

A quarter of the budget is for the most recent tokens. The rest is filled from the rankings of all query heads in turn:
the best token of each head, then the second best of each, and so on, each token once.

As published, but for this: the most recent tokens are those of the middle, as sinks and tail are exact anyway; they are
left out of the rankings after these are joined and not before, so that one joint ranking serves every budget.
"""

from dataclasses import dataclass, field

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.kernels.scores.softmax import softmax_beside
from sparsekv.runtime.selection.context import MiddleContext
from sparsekv.runtime.selection.kept_tokens import ranking
from sparsekv.runtime.selection.layer_sharing import LayerSharing, SharingSelector
from sparsekv.runtime.selection.queries import Queries
from sparsekv.runtime.selection.registry import methods


@methods.register("lessismore")
@dataclass(frozen=True)
class LessIsMore(LayerSharing):
    """Takes the tokens that the heads of a layer before agree on."""

    recent_share: float = field(
        default=0.25, metadata={"help": "Share of the budget that is spent on the document's last tokens."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.recent_share <= 1:
            raise UsageError(f"--recent-share {self.recent_share:g}: give a share from 0 to 1")

    def prepare(self, context: MiddleContext) -> "LessIsMoreSelector":
        """Allocates nothing; a choice of a layer that ranks allocates the logits over the middle, three times over."""
        return LessIsMoreSelector(self, context, self.recent_share)


class LessIsMoreSelector(SharingSelector):
    """Ranks by the best place that a token has with any head."""

    def __init__(self, method: LayerSharing, context: MiddleContext, recent_share: float):
        super().__init__(method, context, "lessismore")
        self.recent_share = recent_share

    def rank(self, queries: Queries) -> torch.Tensor:
        logits = attention_logits(queries.query, self.keys, self.facts.softmax_scale, self.facts.softcap)
        if queries.joint:
            logits = softmax_beside(logits, queries.exact_logsumexp()).mean(2, keepdim=True)
        orders = ranking(logits.flatten(0, 1))
        # A token's turn with a head: heads in order at each rank, as if their rankings were dealt out one by one.
        of_first = len(orders) * torch.arange(orders.shape[-1], dtype=torch.int32, device=orders.device)
        turns = torch.empty_like(orders, dtype=torch.int32).scatter_(-1, orders, of_first.expand_as(orders))
        turns += torch.arange(len(orders), dtype=torch.int32, device=orders.device)[:, None, None]
        return turns.amin(0, keepdim=True).argsort(-1)

    def best(self, order: torch.Tensor, tokens: int) -> torch.Tensor:
        """The most recent ones, then as many of the others as there is room for."""
        middle, others = order.shape[-1], int(tokens * (1 - self.recent_share))
        oldest_recent = middle - (tokens - others)
        # Among the first of the ranking are enough others: at most the rest of them is recent.
        first = order[..., :tokens]
        old_first = (first >= oldest_recent).int().argsort(dim=-1, stable=True)
        recent = torch.arange(oldest_recent, middle, dtype=order.dtype, device=order.device)
        return torch.cat([recent.expand(*order.shape[:-1], -1), first.gather(-1, old_first)[..., :others]], -1)
