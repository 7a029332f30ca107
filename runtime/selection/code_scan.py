"""Scan of all keys' product-quantisation codes: estimates the keys' logits and selects the best tokens.

`CodeEstimates` runs on any device. `CodeScan` and `QuestionScan` run only on a GPU. The compiled step of a CPU is in
`kernels.attention.cluster_step`.
"""

from functools import cached_property

import torch
from torch.nn.functional import embedding_bag

from sparsekv.formats.index.schema import LayerFacts
from sparsekv.kernels.attention.types import ScoredCentroids, TakenRows
from sparsekv.kernels.codes.code_ranks import join_chosen, rank_codes, rank_jointly
from sparsekv.kernels.codes.types import (
    CENTROIDS,
    IN_WORD,
    JoinedKeys,
    KeyCodes,
    LaidOutCodes,
    WeighedClusters,
    as_stored,
    lay_out_codes,
    spans_of,
)
from sparsekv.kernels.common.launch import power_of_two
from sparsekv.kernels.posting_lists.list_ranks import rank_rows, top_ranked
from sparsekv.kernels.posting_lists.types import ExactKeys, KeyGroups
from sparsekv.kernels.scores.logits import softcapped
from sparsekv.runtime.selection.wrappers import ResidualClusters

LARGEST_EXPONENT = 60.0  # upper bound of a logit minus its log-sum-exp: sums of exponentials stay within float32


class CodeEstimates:
    """Estimates logits from one layer's codes [Hk, M, m] uint8, which have one index for each of m parts of a key.

    The codes are indices into the codebooks [Hk, m, C, D / m] float32, of C centroids each. `turn` [Hk, D, D] float32
    rotates queries to the space of the codebooks.

    Args:
        tensors: tensors of the index; see `CodesIndexer.build_layer`.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], facts: LayerFacts):
        self.turn, self.codebooks = tensors["query_turn"].float(), tensors["codebooks"].float()
        self.codes, self.facts = tensors["codes"], facts

    def of(self, query: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Estimate logits [Hk, G, Q, S] float32 of queries [Hk, G, Q, D] on tokens [Hk, Q or 1, S]."""
        codes = self.codes.gather(1, tokens.flatten(1)[..., None].expand(-1, -1, self.codes.shape[2]))
        codes = codes.view(*tokens.shape, -1)[:, None]
        logits = torch.zeros(*query.shape[:3], tokens.shape[-1], device=query.device)
        for part, table in enumerate(self._tables(query).unbind(3)):
            logits += table.gather(-1, codes[..., part].long().expand_as(logits))
        return self._capped(logits)

    def of_all(self, query: torch.Tensor) -> torch.Tensor:
        """Estimate logits [Hk, G, Q, M] of queries on all tokens; on a CPU, torch's `embedding_bag` sums table rows."""
        Hk, G, Q, _ = query.shape
        if query.is_cuda:
            return self.of(query, torch.arange(self.codes.shape[1], device=query.device).expand(Hk, 1, -1))
        rows = self._tables(query).permute(0, 3, 4, 1, 2).reshape(-1, G * Q)
        sums = embedding_bag(self.places, rows, mode="sum").view(Hk, -1, G, Q)
        return self._capped(sums.permute(0, 2, 3, 1))

    @cached_property
    def places(self) -> torch.Tensor:
        """Row of each code in the concatenated tables of all heads and parts, [Hk * M, m] int32."""
        (Hk, _, m), C = self.codes.shape, self.codebooks.shape[2]
        tables = C * torch.arange(Hk * m, dtype=torch.int32).view(Hk, 1, m)
        return (self.codes + tables).flatten(0, 1)

    def _tables(self, query: torch.Tensor) -> torch.Tensor:
        """Compute look-up tables: products [Hk, G, Q, m, C] of each part of the rotated queries with C centroids."""
        turned = torch.einsum("hgqd,hde->hgqe", query.float(), self.turn)
        parts = turned.unflatten(-1, (self.codebooks.shape[1], -1))
        return torch.einsum("hgqpd,hpcd->hgqpc", parts, self.codebooks)

    def _capped(self, products: torch.Tensor) -> torch.Tensor:
        return softcapped(products * self.facts.softmax_scale, self.facts.softcap)


def probability(logits: torch.Tensor, total: torch.Tensor, *, joint: bool) -> torch.Tensor:
    """Compute probabilities [Hk, Q, S] from logits [Hk, G, Q, S] on S tokens, as the mean over the G query heads.

    Args:
        total: [Hk, G, Q], the log-sum-exp of the logits on all rows and centroids to which a query attends.
        joint: compute the mean over the queries, too: [Hk, 1, S].
    """
    # `total` is an estimate, and so a logit may exceed it.
    probability = (logits - total[..., None]).clamp(max=LARGEST_EXPONENT).exp().mean(1)
    return probability.mean(1, keepdim=True) if joint else probability


MOST_PARTS, MOST_CHANNELS = 64, 64  # largest number of parts, and of channels of a part, that kernels support
MOST_SHORT = 2**15  # largest number of clusters whose indices fit int16
FEWEST_KEYS = 2**14  # with fewer keys, launch overhead dominates the time of a step


class CodeScan:
    """Scan of one layer's codes on a GPU, with a second copy of the codes in the kernel's layout.

    Args:
        tensors: tensors of the index; see `CodesIndexer.build_layer`.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], clusters: ResidualClusters, facts: LayerFacts):
        codes, self.facts = tensors["codes"], facts
        turn, books = tensors["query_turn"].contiguous(), tensors["codebooks"].contiguous()
        self.codes = LaidOutCodes(turn, books, lay_out_codes(codes), codes.shape[1], spans_of(books))
        counts, bias = clusters.counts.int().contiguous(), tensors["rest_bias"].float().contiguous()
        self.clusters = WeighedClusters(clusters.keys.contiguous(), counts, bias)
        # Each step reads the labels of all keys, and so labels are stored in few bytes.
        short = torch.int16 if counts.shape[1] <= MOST_SHORT else torch.int32
        self.values, self.labels = tensors["rest_values"], clusters.labels.to(short).contiguous()

    @staticmethod
    def fits(tensors: dict[str, torch.Tensor]) -> bool:
        """Whether kernels support the sizes of the codebooks."""
        _, parts, centroids, size = tensors["codebooks"].shape
        # The kernel unrolls its look-ups over the parts, and stores one part of the rotation in shared memory.
        return parts % IN_WORD == 0 and parts <= MOST_PARTS and size <= MOST_CHANNELS and centroids == CENTROIDS

    @staticmethod
    def serves(tensors: dict[str, torch.Tensor]) -> bool:
        """Whether the codes are on a GPU, in sizes that kernels support, and are enough for kernels to save time."""
        return tensors["codes"].is_cuda and CodeScan.fits(tensors) and tensors["codes"].shape[1] >= FEWEST_KEYS

    def choose_for_each(
        self, query: torch.Tensor, beside: torch.Tensor, tokens: int
    ) -> tuple[JoinedKeys, torch.Tensor]:
        """Select the union of the best tokens of T queries; also count each cluster's selected tokens, [Hk, C] int32.

        Args:
            query: [Hk, G, T, D].
            beside: [Hk, G, T], log-sum-exp of each query's logits on sinks, tail and new tokens (the exact rows).
            tokens: number of tokens of each query's selection.
        """
        Hk, G, T, D = query.shape
        each, nothing = query.transpose(1, 2).reshape(Hk * T, G, D), query.new_empty(Hk, 0, D)
        exact = ExactKeys(nothing, sinks=beside.transpose(1, 2).reshape(Hk * T, G))
        found = rank_codes(each, self.codes, self.clusters, exact, tokens, *self.facts.scaling)
        chosen = top_ranked(found.ranks, tokens).view(Hk, T, tokens)
        taken = torch.zeros_like(self.clusters.counts)
        return join_chosen(chosen, min(self.codes.keys, T * tokens), KeyGroups(self.labels, taken)), taken

    def choose(
        self, query: torch.Tensor, exact: ExactKeys, keys: torch.Tensor | None, tokens: int, candidates: int
    ) -> tuple[torch.Tensor, ScoredCentroids]:
        """Select the best K tokens for one query, and centroids for all other tokens.

        Returns the tokens [Hk, K] int32, in order of position, and the centroids with their logits.

        Args:
            query: [Hk, G, D].
            exact: the keys that are always attended to, for the softmax denominator.
            keys: keys [Hk, M, D] for re-ranking candidates by exact logits; None: no re-ranking.
            tokens: number of tokens K to select.
            candidates: number of tokens to re-rank, at least K.
        """
        found = rank_codes(query, self.codes, self.clusters, exact, candidates, *self.facts.scaling)
        groups = KeyGroups(self.labels, found.taken)
        if keys is None or candidates == tokens:
            chosen = top_ranked(found.ranks, tokens, groups=groups)
        else:
            listed = top_ranked(found.ranks, candidates)
            ranks = rank_rows(query, keys, listed, found.ranks.logsumexp, tokens, *self.facts.scaling)
            chosen = top_ranked(ranks, tokens, listed, groups)
        clusters = TakenRows(self.clusters.counts, found.taken)
        return chosen, ScoredCentroids(found.logits, self.clusters.bias, self.values, clusters=clusters)


class QuestionScan:
    """Scan of one layer's codes for all tokens of a question together, without a copy of the stored codes.

    Args:
        tensors: tensors of the index; see `CodesIndexer.build_layer`.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], facts: LayerFacts):
        turn, books, codes = (tensors[name].contiguous() for name in ("query_turn", "codebooks", "codes"))
        self.codes, self.facts = KeyCodes(turn, books, as_stored(codes), codes.shape[1]), facts

    @staticmethod
    def fits(tensors: dict[str, torch.Tensor]) -> bool:
        """Whether the kernel supports the sizes of the codebooks."""
        # A tile of the kernel has the channels of all parts. Its sizes must be powers of two, and its matrix product
        # needs at least 16 channels.
        _, parts, _, size = tensors["codebooks"].shape
        powers = all(power_of_two(number) == number for number in (parts, size)) and parts * size >= 16
        return CodeScan.fits(tensors) and powers

    @staticmethod
    def serves(tensors: dict[str, torch.Tensor]) -> bool:
        """Whether the codes are on a GPU, the kernel supports them, and there are enough keys for it to save time."""
        return CodeScan.serves(tensors) and QuestionScan.fits(tensors)

    def choose(self, query: torch.Tensor, totals: torch.Tensor, tokens: int) -> torch.Tensor:
        """Select the best tokens [Hk, K] int32 for queries [Hk, G, T, D] together, in order of position.

        `totals` [Hk, G, T] are the log-sum-exps of each query's logits on all rows and centroids that it attends to.
        """
        ranks = rank_jointly(query.flatten(1, 2), totals.flatten(1), self.codes, tokens, *self.facts.scaling)
        return top_ranked(ranks, tokens)
