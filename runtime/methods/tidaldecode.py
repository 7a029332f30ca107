"""TidalDecode (arXiv 2410.05076): two layers choose tokens by their exact attention, and the others take the same.

As in the paper, a layer that chooses attends to everything, its keys being read anyway. The published code lets each
query head choose for itself, and repeats keys for it; here one choice serves a group, by the mean of its heads'
probabilities, as a cache of one row a KV head wants it. A question's tokens share a choice: the paper prefills them
densely.
"""

from dataclasses import dataclass

import torch

from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.selection.context import MiddleContext
from sparsekv.runtime.selection.kept_tokens import ranking
from sparsekv.runtime.selection.layer_sharing import LayerSharing, SharingSelector
from sparsekv.runtime.selection.queries import Queries
from sparsekv.runtime.selection.registry import methods
from sparsekv.runtime.selection.token_choice import group_probability


@methods.register("tidaldecode")
@dataclass(frozen=True)
class TidalDecode(LayerSharing):
    """Takes the tokens that a layer before attended to most, KV head by KV head."""

    def prepare(self, context: MiddleContext) -> "TidalSelector":
        """Allocates nothing; a choice of a layer that ranks allocates the logits over the middle."""
        return TidalSelector(self, context, "tidaldecode")


class TidalSelector(SharingSelector):
    """Ranks by exact probability."""

    def rank(self, queries: Queries) -> torch.Tensor:
        logits = attention_logits(queries.query, self.keys, self.facts.softmax_scale, self.facts.softcap)
        return ranking(group_probability(logits, queries))
