"""QUEST (arXiv 2406.10774): selection of pages of consecutive tokens by an upper bound of their logits.

The bound is computed from the page's minimum and maximum of each key channel.
"""

from dataclasses import dataclass, field

import torch

from sparsekv.formats.errors import check_at_least_one
from sparsekv.kernels.clusters.cluster_choice import MOST_TOKENS, best_first, choose_clusters
from sparsekv.kernels.common.row_operations import fill_budget
from sparsekv.kernels.scores.logits import attention_logits, scores_from_logits
from sparsekv.runtime.selection.interface import (
    Budget,
    Cost,
    Method,
    MiddleContext,
    Queries,
    RowIndices,
    RowSet,
    Selection,
    Selector,
    methods,
)


@methods.register("quest")
@dataclass(frozen=True)
class Quest(Method):
    """Reads each page's minimum and maximum of each key channel, and selects the pages with the highest bounds."""

    page_size: int = field(default=16, metadata={"help": "Tokens per page."})

    def __post_init__(self) -> None:
        check_at_least_one(self, "page_size")

    def prepare(self, context: MiddleContext) -> "QuestSelector":
        """Create the selector of a layer. Allocates two rows per page and head, and temporarily a copy of the keys."""
        return QuestSelector(self, context)


class QuestSelector(Selector):
    """Selects pages by their bounds. The last page may have fewer tokens.

    `extremes` [Hk, P, 2 D] has, for each of the P pages, the maximum of each key channel, and then the minimum of each
    channel. The bound of a page is an inner product: the maxima times the query's positive part, plus the minima times
    the query's negative part.
    """

    def __init__(self, method: Quest, context: MiddleContext):
        keys, size = context.keys, min(method.page_size, context.keys.shape[1])
        pages = -(-keys.shape[1] // size)
        padding = keys[:, -1:].expand(-1, pages * size - keys.shape[1], -1)
        paged = torch.cat([keys, padding], 1).unflatten(1, (pages, size))
        self.extremes = torch.cat([paged.amax(2), paged.amin(2)], -1)
        starts = torch.arange(0, keys.shape[1], size, device=keys.device)
        self.starts = starts.expand(len(keys), -1).contiguous()
        self.lengths = (keys.shape[1] - self.starts).clamp(max=size).int()
        self.middle, self.facts = keys.shape[1], context.facts
        self.cost = Cost(2.0 * pages)

    def bounds(self, query: torch.Tensor) -> torch.Tensor:
        """Compute an upper bound [Hk, G, Q, P] float32 of the logits of queries [Hk, G, Q, D] on each page's keys."""
        return attention_logits(_by_sign(query), self.extremes, *self.facts.scaling)

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select the best pages, the last of them in part, by a softmax in which a token's logit is its page's bound.

        The softmax is averaged over the query heads of a KV head, and over the queries if they share a selection.
        """
        tokens = budget.tokens(self.middle)
        if queries.query.is_cuda and queries.query.shape[2] == 1 and self.middle <= MOST_TOKENS:
            return self._select_by_kernels(queries.query, tokens)
        scores = scores_from_logits(self.bounds(queries.query), self.lengths[:, None, None])
        scores = scores.mean(1, keepdim=True) if queries.joint else scores
        order = best_first(scores, tokens)
        lengths = fill_budget(self.lengths[0][order], tokens)
        return Selection(RowSet(self.starts[0][order], lengths, tokens), self.cost)

    def _select_by_kernels(self, query: torch.Tensor, tokens: int) -> Selection:
        """Select pages for one query with kernels that treat pages as clusters."""
        pages = _by_sign(query)[:, :, 0], self.extremes, self.lengths, self.starts
        chosen = choose_clusters(*pages, tokens, *self.facts.scaling)
        indices = RowIndices(chosen.rows, chosen.used, chosen.queue)
        return Selection(RowSet(self.starts[:, None], chosen.lengths[:, None], tokens, tokens, indices), self.cost)


def _by_sign(query: torch.Tensor) -> torch.Tensor:
    """Concatenate the positive part and the negative part of a query [..., D] to [..., 2 D]."""
    return torch.cat([query.clamp(min=0), query.clamp(max=0)], -1)
