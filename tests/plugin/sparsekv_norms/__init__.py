"""A method of another package: tokens with the shortest keys (arXiv 2406.11430), whatever the query."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from sparsekv.indexing.indexers.interface import Indexer, LayerInput
from sparsekv.runtime.selection.interface import (
    Budget,
    Cost,
    Method,
    MiddleContext,
    Queries,
    RowSet,
    Selection,
    Selector,
)


@dataclass(frozen=True)
class NormsIndexer(Indexer):
    """Orders tokens by the norm of their key."""

    norm_power: float = field(default=2.0, metadata={"help": "Power of the norm."})

    def build_layer(self, layer: LayerInput) -> dict[str, torch.Tensor]:
        """Allocates one number a token."""
        order = layer.keys.float().norm(p=self.norm_power, dim=-1).argsort(dim=-1)
        return {"token_order": (order + layer.split.sinks).int()}


@dataclass(frozen=True)
class Norms(Method):
    """Reads the tokens with the shortest keys."""

    needs_index: ClassVar[bool] = True
    skipped: int = field(default=0, metadata={"help": "Tokens with the very shortest keys that are left out."})

    def prepare(self, context: MiddleContext) -> "NormsSelector":
        """Allocates the order."""
        return NormsSelector(context.tensors["token_order"].long(), self.skipped)


class NormsSelector(Selector):
    """The shortest keys lie first, so a choice is one run."""

    def __init__(self, order: torch.Tensor, skipped: int):
        self.layout, self.skipped, self.middle = order, skipped, order.shape[1]

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """As many tokens as the budget has, after those that are skipped."""
        tokens, query = min(budget.tokens(self.middle), self.middle - self.skipped), queries.query
        start = query.new_zeros(query.shape[0], 1 if queries.joint else query.shape[2], 1, dtype=torch.int64)
        start = start + self.skipped
        return Selection(RowSet(start, torch.full_like(start, tokens), tokens), Cost(index_rows=0.0))
