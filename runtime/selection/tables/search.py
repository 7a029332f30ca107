"""One decode step's search of query-centric posting lists, by kernels that read them by token and need no sync."""

import math

import torch

from sparsekv.formats.schema import LayerFacts
from sparsekv.kernels.tables.list_codes import encode_lists
from sparsekv.kernels.tables.list_ranks import rank_tokens
from sparsekv.kernels.tables.row_ranks import rank_rows
from sparsekv.kernels.tables.table_lookup import Tables
from sparsekv.kernels.tables.top_ranks import top_ranked
from sparsekv.kernels.tables.types import ExactKeys
from sparsekv.runtime.selection.selection import Cost, Selection, single_rows

FEWEST_KEYS = 2**14  # with fewer keys launch overhead dominates a step, so the plain posting lists are read instead


class ListSearch:
    """One layer's posting lists, laid out by token: a four-bit code for every middle key in each list.

    Args:
        tables: the posting lists to encode, and the centroids, which are kept.
        scoring, weights: see `estimate_part` and `look_up`.
    """

    def __init__(self, tables: Tables, scoring: str, weights: torch.Tensor | None, facts: LayerFacts):
        self.lists, self.facts = encode_lists(tables, scoring, weights), facts

    def select(
        self, query: torch.Tensor, exact: ExactKeys, keys: torch.Tensor, tokens: int, rerank: float = 1.0
    ) -> Selection:
        """The best tokens, in order of position; the cost counts the reads of each query head of a group separately.

        Args:
            query: [Hk, G, D].
            keys: [Hk, M, D] of the middle.
            rerank: candidates per chosen token, which are re-ranked by exact logits; 1: no re-ranking.
        """
        scale, softcap = self.facts.softmax_scale, self.facts.softcap
        candidates = min(self.lists.keys, math.ceil(tokens * rerank))
        ranked = rank_tokens(query, self.lists, exact, candidates, scale, softcap)
        chosen, more = top_ranked(ranked, candidates), candidates - tokens
        if more:
            ranked = rank_rows(query, keys, chosen, ranked.logsumexp, tokens, scale, softcap)
            chosen = top_ranked(ranked, tokens, chosen)
        read = query.shape[1] * self.lists.codes[0, :, 0].nbytes + self.lists.centroids[0].nbytes
        return Selection(
            single_rows(chosen[:, None]),
            Cost(read / (keys.shape[2] * keys.element_size()) + more),
        )
