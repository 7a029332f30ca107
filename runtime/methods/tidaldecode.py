"""TidalDecode (arXiv 2410.05076): two layers choose tokens by exact attention, and the other layers use the same ones.

As in the paper, a layer that chooses attends to everything, because it reads all keys anyway. In the published code
each query head chooses for itself, with keys repeated per head; here one selection serves a group, by the mean of its
heads' probabilities, which suits a cache with one row per KV head. Where a question's tokens select, they share a
selection.
"""

from dataclasses import dataclass

import torch

from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.selection.interface import MiddleContext, Queries
from sparsekv.runtime.selection.registry import methods
from sparsekv.runtime.selection.token_choice import LayerSharing, SharingSelector, group_probability, ranking


@methods.register("tidaldecode")
@dataclass(frozen=True)
class TidalDecode(LayerSharing):
    """Attends to the tokens that an earlier layer attended to most, per KV head."""

    def prepare(self, context: MiddleContext) -> "TidalSelector":
        """Allocates nothing; each selection of a ranking layer allocates the logits over the middle."""
        return TidalSelector(self, context, "tidaldecode")


class TidalSelector(SharingSelector):
    """Ranks by exact probability."""

    def rank(self, queries: Queries) -> torch.Tensor:
        logits = attention_logits(queries.query, self.keys, *self.facts.scaling)
        return ranking(group_probability(logits, queries))
