"""QuoKA prefill (section 3.4 of the paper): each chunk attends to the keys nearest to its most atypical queries."""

from dataclasses import dataclass

import torch

from sparsekv.formats.quoka import QuokaOptions
from sparsekv.formats.schema import LayerFacts
from sparsekv.indexing.prefill.interface import SparsePrefill, prefills
from sparsekv.kernels.scores.quoka import directions, far_directions, nearest_keys, quoka_scores, subselect_queries


@prefills.register("quoka")
@dataclass(frozen=True)
class QuokaPrefill(QuokaOptions, SparsePrefill):
    """Scores keys by cosine to a few queries of the chunk; on a GPU by kernels that do not store the scores."""

    def __post_init__(self) -> None:
        SparsePrefill.__post_init__(self)
        QuokaOptions.__post_init__(self)

    def choose(self, query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts, first: int, last: int) -> torch.Tensor:
        if self.quoka_similarity != "cosine":
            return super().choose(query, keys, facts, first, last)
        if self.quoka_subset == "far":
            some = far_directions(query, self.prefill_queries)
        else:
            some = directions(subselect_queries(query, self.prefill_queries, self.quoka_subset, seed=keys.shape[1]))
        return nearest_keys(some, keys, self.prefill_budget, first, last, self.quoka_across)

    def scores(self, query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
        some = subselect_queries(query, self.prefill_queries, self.quoka_subset, seed=keys.shape[1])
        return quoka_scores(some, keys, similarity=self.quoka_similarity, across=self.quoka_across)[:, 0]
