"""QuoKA prefill (section 3.4 of the paper): each chunk attends to the keys nearest to its least ordinary queries."""

from dataclasses import dataclass

import torch

from sparsekv.formats.quoka import QuokaOptions
from sparsekv.formats.schema import LayerFacts
from sparsekv.indexing.prefill import SparsePrefill, register
from sparsekv.kernels.quoka import quoka_scores, subselect_queries


@register("quoka")
@dataclass(frozen=True)
class QuokaPrefill(QuokaOptions, SparsePrefill):
    """Scores keys by cosine to a few queries of the chunk; works on any device with standard operations."""

    def __post_init__(self) -> None:
        SparsePrefill.__post_init__(self)
        QuokaOptions.__post_init__(self)

    def scores(self, query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
        some = subselect_queries(query, self.prefill_queries, self.quoka_subset, seed=keys.shape[1])
        return quoka_scores(some, keys, similarity=self.quoka_similarity, across=self.quoka_across)[:, 0]
