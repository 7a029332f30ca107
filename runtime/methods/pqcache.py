"""Decoding with PQCache (arXiv 2407.12820): the logits of all keys are estimated from product-quantisation codes.

A query's products with all centroids form a lookup table. A key's estimated logit is the sum of the entries for its
codes (asymmetric distance computation). The best keys by this estimate are attended to. With re-ranking, more
candidates than the budget are chosen by the estimate, and the best of them by exact logits.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch

from sparsekv.formats.index.schema import MethodRecord
from sparsekv.kernels.scores.logits import best_tokens, softcapped
from sparsekv.runtime.selection.interface import (
    Budget,
    Cost,
    Method,
    MiddleContext,
    Queries,
    Selection,
    Selector,
    methods,
    single_rows,
)
from sparsekv.runtime.selection.token_choice import (
    check_rerank,
    group_probability,
    rerank_scores,
    token_logits,
    top_tokens,
)


@methods.register("pqcache")
@dataclass(frozen=True)
class PQCache(Method):
    """Ranks all keys by logits that are estimated from codes and codebooks."""

    needs_index: ClassVar[bool] = True
    rerank: float = field(
        default=1.0,
        metadata={"help": "Rank this many times the budget's keys by exact logits, and attend to the best; 1: off."},
    )

    def __post_init__(self) -> None:
        check_rerank(self.rerank)

    @classmethod
    def variants(cls, record: MethodRecord | None) -> dict[str, Self]:
        """Return the paper's variant, and a variant with re-ranking."""
        return {"": cls(), "reranked": cls(rerank=1.5)}

    def prepare(self, context: MiddleContext) -> "PQSelector":
        """Create the selector of a layer. Allocates the codebooks in float32.

        Each selection allocates the logits of all keys between sinks and tail a few times.
        """
        return PQSelector(context, self.rerank)


class PQSelector(Selector):
    """Makes one selection for all query heads of a KV head, by estimated logits.

    `codes` [Hk, M, m] uint8 are indices of the M tokens' centroids in m subspaces. `codebooks` [Hk, m, C, D / m]
    float32 are the C centroids of each subspace.
    """

    def __init__(self, context: MiddleContext, rerank: float):
        self.keys, self.facts, self.rerank = context.keys, context.facts, rerank
        self.codes, stored = context.tensors["codes"], context.tensors["codebooks"]
        self.codebooks = stored.float()
        row_bytes = self.keys.shape[2] * self.keys.element_size()
        self.index_rows = (self.codes[0].numel() + stored[0].numel() * stored.element_size()) / row_bytes

    def estimates(self, query: torch.Tensor) -> torch.Tensor:
        """Estimate the logits [Hk, G, Q, M] float32 of queries [Hk, G, Q, D]."""
        Hk, G, Q, _ = query.shape
        parts = query.float().flatten(1, 2).unflatten(-1, (self.codebooks.shape[1], -1)).transpose(1, 2)
        tables = parts @ self.codebooks.transpose(-1, -2)
        logits = torch.zeros(Hk, G * Q, self.codes.shape[1], device=query.device)
        for table, codes in zip(tables.unbind(1), self.codes.unbind(-1), strict=True):
            logits += table.gather(-1, codes.long()[:, None].expand_as(logits))
        logits = logits.view(Hk, G, Q, -1) * self.facts.softmax_scale
        return softcapped(logits, self.facts.softcap)

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select the tokens of highest estimated probability; with re-ranking, the best candidates by exact logits."""
        logits, tokens = self.estimates(queries.query), budget.tokens(self.codes.shape[1])
        scores = group_probability(logits, queries)
        candidates = min(scores.shape[-1], math.ceil(tokens * self.rerank))
        if candidates == tokens:
            return top_tokens(scores, tokens, self.index_rows)
        best = best_tokens(scores, candidates)
        exact = token_logits(queries.query, self.keys, best, self.facts)
        seen = logits.scatter(-1, best[:, None].expand_as(exact), exact)
        totals = torch.logaddexp(seen.logsumexp(-1), queries.exact_logsumexp())
        starts = best.gather(-1, best_tokens(rerank_scores(exact, totals, joint=queries.joint), tokens))
        more = candidates - tokens
        return Selection(single_rows(starts), Cost(self.index_rows + more, unshared=more))
