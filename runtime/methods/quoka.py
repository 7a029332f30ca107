"""QuoKA (decoding: section 4.4 of the paper): the keys of highest cosine similarity to the query. Reads every key.

Where a question's tokens select, they share one selection, made by the few queries that are least similar to their
mean, as for a chunk of a document's prefill; a decode step's query is used as it is.
"""

from dataclasses import dataclass
from typing import ClassVar

from sparsekv.formats.index.schema import QuokaOptions
from sparsekv.kernels.scores.quoka import key_norms, quoka_scores, subselect_queries
from sparsekv.runtime.selection.interface import Budget, Method, MiddleContext, Queries, Selection, Selector
from sparsekv.runtime.selection.registry import methods
from sparsekv.runtime.selection.token_choice import top_tokens


@methods.register("quoka")
@dataclass(frozen=True)
class Quoka(QuokaOptions, Method):
    """Ranks keys by cosine to normalised queries, averaged over the group."""

    reads_all_keys: ClassVar[bool] = True

    def prepare(self, context: MiddleContext) -> "QuokaSelector":
        """Allocates one norm per key and head."""
        return QuokaSelector(self, context)


class QuokaSelector(Selector):
    """keys [Hk, M, D] and their norms [Hk, M]."""

    def __init__(self, method: Quoka, context: MiddleContext):
        self.method, self.keys, self.norms = method, context.keys, key_norms(context.keys)

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Allocates the scores [Hk, Q, M] float32 of the queries that are kept."""
        how, middle = self.method, self.keys.shape[1]
        query, across = queries.query, "none"
        if queries.joint:
            query, across = subselect_queries(query, how.prefill_queries, how.quoka_subset), how.quoka_across
        scores = quoka_scores(query, self.keys, self.norms, how.quoka_similarity, across)
        return top_tokens(scores, budget.tokens(middle), float(middle))
