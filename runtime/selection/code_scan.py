"""One decode step's choice by codes of all keys, by kernels that need no sync."""

import torch

from sparsekv.formats.schema import LayerFacts
from sparsekv.kernels.attention.types import ScoredCentroids
from sparsekv.kernels.codes.code_ranks import count_left, rank_codes
from sparsekv.kernels.codes.types import CENTROIDS, IN_WORD, MOST_PARTS, KeyCodes, WeighedClusters, lay_out
from sparsekv.kernels.tables.row_ranks import rank_rows
from sparsekv.kernels.tables.top_ranks import top_ranked
from sparsekv.kernels.tables.types import ExactKeys
from sparsekv.runtime.selection.residual import ResidualClusters

FEWEST_KEYS = 2**14  # with fewer keys launch overhead dominates a step


class CodeScan:
    """One layer's codes, laid out for a scan; a second copy of them.

    Args:
        tensors: of the index; see `CodesIndexer.build_layer`.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], clusters: ResidualClusters, facts: LayerFacts):
        codes, self.facts = tensors["codes"], facts
        self.codes = KeyCodes(
            tensors["query_turn"].contiguous(), tensors["codebooks"].contiguous(), lay_out(codes), codes.shape[1]
        )
        self.clusters = WeighedClusters(
            clusters.keys,
            tensors["rest_values"],
            clusters.counts.int(),
            tensors["rest_bias"].float(),
            clusters.labels.int(),
        )

    @staticmethod
    def serves(tensors: dict[str, torch.Tensor]) -> bool:
        """Whether there are kernels for such codes, and keys enough that they pay."""
        codes, books = tensors["codes"], tensors["codebooks"]
        parts = codes.shape[2]
        few = parts % IN_WORD == 0 and parts <= MOST_PARTS
        return codes.is_cuda and few and books.shape[2] == CENTROIDS and codes.shape[1] >= FEWEST_KEYS

    def choose(
        self, query: torch.Tensor, exact: ExactKeys, keys: torch.Tensor, tokens: int, candidates: int
    ) -> tuple[torch.Tensor, ScoredCentroids]:
        """The best tokens [Hk, K] int32, in order of position, and what stands for all others.

        Args:
            query: [Hk, G, D]; keys: [Hk, M, D] of the middle.
            tokens: K; candidates: at least as many, of which the best by exact logits are chosen.
        """
        scale, softcap = self.facts.softmax_scale, self.facts.softcap
        found = rank_codes(query, self.codes, self.clusters, exact, candidates, scale, softcap)
        chosen = top_ranked(found.ranks, candidates)
        if candidates > tokens:
            ranks = rank_rows(query, keys, chosen, found.ranks.logsumexp, tokens, scale, softcap)
            chosen = top_ranked(ranks, tokens, chosen)
        left = count_left(chosen, self.clusters, found.taken)
        return chosen, ScoredCentroids(found.logits, left, self.clusters.values)
