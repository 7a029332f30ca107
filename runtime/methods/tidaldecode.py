"""TidalDecode (arXiv 2410.05076): two layers rank tokens by exact attention, and later layers attend to the best.

As in the paper, a layer that ranks attends to everything, because it reads all keys anyway. In the published code each
query head selects for itself, with keys repeated per head. Here one selection serves the query heads of a group, by the
mean of their probabilities, because the cache has one row per KV head. The tokens of a question share a selection.
"""

from dataclasses import dataclass

import torch

from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.selection.interface import MiddleContext, Queries, methods
from sparsekv.runtime.selection.token_choice import LayerSharing, SharingSelector, group_probability, ranking


@methods.register("tidaldecode")
@dataclass(frozen=True)
class TidalDecode(LayerSharing):
    """Attends to the tokens that an earlier layer attended to most, per KV head."""

    def prepare(self, context: MiddleContext) -> "TidalSelector":
        """Create the selector of a layer. Each selection in a ranking layer allocates the logits of all M keys."""
        return TidalSelector(self, context, "tidaldecode")


class TidalSelector(SharingSelector):
    """Ranks tokens by exact attention probability."""

    def rank(self, queries: Queries) -> torch.Tensor:
        logits = attention_logits(queries.query, self.keys, *self.facts.scaling)
        return ranking(group_probability(logits, queries))
