"""SampleAttention (arXiv 2406.15486): one selection for a whole question by the attention of a few of its queries.

SampleAttention is a method for prefills. In decoding, with one query, it ranks all keys by exact attention. Every
selection reads every key.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from sparsekv.formats.errors import check_at_least_one
from sparsekv.kernels.attention.attention import spaced_places
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.selection.interface import Budget, Method, MiddleContext, Queries, Selection, Selector, methods
from sparsekv.runtime.selection.token_choice import group_probability, top_tokens


@methods.register("sampleattention")
@dataclass(frozen=True)
class SampleAttention(Method):
    """Ranks keys by the mean attention of evenly spaced queries."""

    reads_all_keys: ClassVar[bool] = True
    prefill_queries: int = field(
        default=16,
        metadata={
            "joint": True,
            "help": "How many of a chunk's queries rank the tokens that the whole chunk attends to.",
        },
    )

    def __post_init__(self) -> None:
        check_at_least_one(self, "prefill_queries")

    def prepare(self, context: MiddleContext) -> "SampleAttentionSelector":
        """Create the selector of a layer, without allocations."""
        return SampleAttentionSelector(self, context)


class SampleAttentionSelector(Selector):
    """Selects by exact logits on the keys [Hk, M, D]."""

    def __init__(self, method: SampleAttention, context: MiddleContext):
        self.queries, self.keys, self.facts = method.prefill_queries, context.keys, context.facts

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select the tokens of highest mean probability. Allocates the sampled queries' logits of all M keys."""
        some = self._some(queries) if queries.joint else queries
        logits = attention_logits(some.query, self.keys, *self.facts.scaling)
        middle = self.keys.shape[1]
        return top_tokens(group_probability(logits, some), budget.tokens(middle), float(middle))

    def _some(self, queries: Queries) -> Queries:
        places = spaced_places(queries.query.shape[2], self.queries).to(queries.query.device)
        exact = queries.exact_logsumexp
        return replace(queries, query=queries.query[:, :, places], exact_logsumexp=lambda: exact()[..., places])
