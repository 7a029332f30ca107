"""Choices by codes of all keys, for one query or several, by kernels that need no sync."""

import torch

from sparsekv.formats.schema import LayerFacts
from sparsekv.kernels.attention.types import ScoredCentroids, TakenRows
from sparsekv.kernels.codes.code_ranks import rank_codes
from sparsekv.kernels.codes.joined import join_chosen
from sparsekv.kernels.codes.joint_ranks import rank_jointly
from sparsekv.kernels.codes.types import (
    CENTROIDS,
    IN_WORD,
    JoinedKeys,
    KeyCodes,
    LaidOutCodes,
    WeighedClusters,
    as_stored,
    lay_out,
)
from sparsekv.kernels.common.tiles_triton import power_of_two
from sparsekv.kernels.tables.row_ranks import rank_rows
from sparsekv.kernels.tables.top_ranks import top_ranked
from sparsekv.kernels.tables.types import ExactKeys, KeyGroups
from sparsekv.runtime.selection.residual import ResidualClusters

MOST_PARTS, MOST_CHANNELS = 64, 64  # that kernels serve
MOST_SHORT = 2**15  # clusters that a number of two bytes, which are signed, tells apart
FEWEST_KEYS = 2**14  # with fewer keys launch overhead dominates a step


class CodeScan:
    """One layer's codes, laid out for a scan; a second copy of them.

    Args:
        tensors: of the index; see `CodesIndexer.build_layer`.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], clusters: ResidualClusters, facts: LayerFacts):
        codes, self.facts = tensors["codes"], facts
        turn, books = tensors["query_turn"].contiguous(), tensors["codebooks"].contiguous()
        self.codes = LaidOutCodes(turn, books, lay_out(codes), codes.shape[1])
        counts, bias = clusters.counts.int().contiguous(), tensors["rest_bias"].float().contiguous()
        self.clusters = WeighedClusters(clusters.keys.contiguous(), counts, bias)
        # Read for all keys in each step.
        short = torch.int16 if counts.shape[1] <= MOST_SHORT else torch.int32
        self.values, self.labels = tensors["rest_values"], clusters.labels.to(short).contiguous()

    @staticmethod
    def serves(tensors: dict[str, torch.Tensor]) -> bool:
        """Whether there are kernels for such codes, and keys enough that they pay."""
        codes, (_, parts, centroids, size) = tensors["codes"], tensors["codebooks"].shape
        # Look-ups are unrolled over the parts, and a part of the turn is in shared memory.
        fits = parts % IN_WORD == 0 and parts <= MOST_PARTS and size <= MOST_CHANNELS
        return codes.is_cuda and fits and centroids == CENTROIDS and codes.shape[1] >= FEWEST_KEYS

    def choose_for_each(
        self, query: torch.Tensor, beside: torch.Tensor, tokens: int
    ) -> tuple[JoinedKeys, torch.Tensor]:
        """What any of T queries chooses, each the best tokens by itself, and how many of each cluster [Hk, C] int32.

        Args:
            query: [Hk, G, T, D].
            beside: [Hk, G, T], the log-sum-exps of each one's logits on what it attends to beside the middle.
        """
        (Hk, G, T, D), scale, softcap = query.shape, self.facts.softmax_scale, self.facts.softcap
        each, nothing = query.transpose(1, 2).reshape(Hk * T, G, D), query.new_empty(Hk, 0, D)
        exact = ExactKeys(nothing, sinks=beside.transpose(1, 2).reshape(Hk * T, G))
        found = rank_codes(each, self.codes, self.clusters, exact, tokens, scale, softcap)
        chosen = top_ranked(found.ranks, tokens).view(Hk, T, tokens)
        taken = torch.zeros_like(self.clusters.counts)
        return join_chosen(chosen, min(self.codes.keys, T * tokens), KeyGroups(self.labels, taken)), taken

    def choose(
        self, query: torch.Tensor, exact: ExactKeys, keys: torch.Tensor | None, tokens: int, candidates: int
    ) -> tuple[torch.Tensor, ScoredCentroids]:
        """The best tokens [Hk, K] int32, in order of position, and what stands for all others.

        Args:
            query: [Hk, G, D]
            keys: [Hk, M, D] of the middle; None: the candidates are those that are chosen.
            tokens: K; candidates: at least as many, of which the best by exact logits are chosen.
        """
        scale, softcap = self.facts.softmax_scale, self.facts.softcap
        found = rank_codes(query, self.codes, self.clusters, exact, candidates, scale, softcap)
        groups = KeyGroups(self.labels, found.taken)
        if keys is None or candidates == tokens:
            chosen = top_ranked(found.ranks, tokens, groups=groups)
        else:
            listed = top_ranked(found.ranks, candidates)
            ranks = rank_rows(query, keys, listed, found.ranks.logsumexp, tokens, scale, softcap)
            chosen = top_ranked(ranks, tokens, listed, groups)
        clusters = TakenRows(self.clusters.counts, found.taken)
        return chosen, ScoredCentroids(found.logits, self.clusters.bias, self.values, clusters=clusters)


class QuestionScan:
    """One layer's codes as they are stored, for a question's tokens together; copies none of them.

    Args:
        tensors: of the index; see `CodesIndexer.build_layer`.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], facts: LayerFacts):
        turn, books, codes = (tensors[name].contiguous() for name in ("query_turn", "codebooks", "codes"))
        self.codes, self.facts = KeyCodes(turn, books, as_stored(codes), codes.shape[1]), facts

    @staticmethod
    def serves(tensors: dict[str, torch.Tensor]) -> bool:
        """Whether there is a kernel for such codes, and keys enough that it pays."""
        # Its tiles have all parts, their sizes are powers of two, and a product takes at least 16 channels.
        _, parts, _, size = tensors["codebooks"].shape
        fits = all(power_of_two(number) == number for number in (parts, size)) and parts * size >= 16
        return CodeScan.serves(tensors) and fits

    def choose(self, query: torch.Tensor, totals: torch.Tensor, tokens: int) -> torch.Tensor:
        """The best tokens [Hk, K] int32 for queries [Hk, G, T, D] together, in order of position; totals [Hk, G, T]:
        the log-sum-exps of all that each attends to."""
        scale, softcap = self.facts.softmax_scale, self.facts.softcap
        ranks = rank_jointly(query.flatten(1, 2), totals.flatten(1), self.codes, tokens, scale, softcap)
        return top_ranked(ranks, tokens)
