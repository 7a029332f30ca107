"""Sparse prefills: QuoKA (query-oriented KV selection for chunked prefill, section 3.4 of its paper), SampleAttention
(arXiv 2406.15486) and KeyDiff (arXiv 2504.15364)."""

from dataclasses import dataclass, field

import torch

from sparsekv.formats.errors import check_at_least_one
from sparsekv.formats.index.schema import LayerFacts, QuokaOptions
from sparsekv.indexing.prefill.interface import SparsePrefill, prefills
from sparsekv.kernels.attention.attention import sampled_attention, spaced_places
from sparsekv.kernels.scores.logits import keydiff_scores
from sparsekv.kernels.scores.quoka import directions, far_directions, nearest_keys, quoka_scores, subselect_queries


@prefills.register("sampleattention")
@dataclass(frozen=True)
class SampleAttentionPrefill(SparsePrefill):
    """Scores keys by the attention that evenly spaced queries of the chunk pay to them."""

    prefill_queries: int = field(
        default=16, metadata={"help": "How many of a chunk's queries rank the tokens that the whole chunk attends to."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(self, "prefill_queries")

    def scores(self, query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
        some = query[:, :, spaced_places(query.shape[2], self.prefill_queries).to(query.device)]
        return sampled_attention(some, keys, *facts.scaling)


@prefills.register("keydiff")
@dataclass(frozen=True)
class KeyDiffPrefill(SparsePrefill):
    """Scores keys by their negative cosine with the mean key direction, independently of the queries."""

    def scores(self, query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
        return keydiff_scores(keys)


@prefills.register("quoka")
@dataclass(frozen=True)
class QuokaPrefill(QuokaOptions, SparsePrefill):
    """Scores keys by their similarity to some queries of the chunk; by default the cosine to a few of them.

    For the cosine, kernels on a GPU select the keys without storing scores.
    """

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
        some = some.mean(1, keepdim=True) if self.quoka_across == "mean" else some
        return nearest_keys(some, keys, self.prefill_budget, first, last)

    def scores(self, query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
        some = subselect_queries(query, self.prefill_queries, self.quoka_subset, seed=keys.shape[1])
        return quoka_scores(some, keys, similarity=self.quoka_similarity, across=self.quoka_across)[:, 0]
