"""QuoKA (section 4.4 of its paper for decoding): the keys of highest cosine to the query. Reads every key.

A question's tokens share one choice, by the few queries that are least like their mean, as a chunk of a document's
prefill does; a decode step's query is used as it is.
"""

from dataclasses import dataclass

from sparsekv.formats.quoka import QuokaOptions
from sparsekv.kernels.scores.quoka import key_norms, quoka_scores, subselect_queries
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.context import MiddleContext
from sparsekv.runtime.selection.interface import Method, Selector
from sparsekv.runtime.selection.queries import Queries
from sparsekv.runtime.selection.registry import methods
from sparsekv.runtime.selection.selection import Selection
from sparsekv.runtime.selection.token_choice import top_tokens


@methods.register("quoka")
@dataclass(frozen=True)
class Quoka(QuokaOptions, Method):
    """Ranks keys by cosine to normalised queries, averaged over the group."""

    def prepare(self, context: MiddleContext) -> "QuokaSelector":
        """Allocates a number a key and head."""
        return QuokaSelector(self, context)


class QuokaSelector(Selector):
    """keys [Hk, M, D] and their norms [Hk, M]."""

    def __init__(self, method: Quoka, context: MiddleContext):
        self.method, self.keys, self.norms = method, context.keys, key_norms(context.keys)

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Allocates the scores [Hk, Q, M] float32 of the queries that choose."""
        how, middle = self.method, self.keys.shape[1]
        query, across = queries.query, "none"
        if queries.joint:
            query, across = subselect_queries(query, how.prefill_queries, how.quoka_subset), how.quoka_across
        scores = quoka_scores(query, self.keys, self.norms, how.quoka_similarity, across)
        return top_tokens(scores, budget.tokens(middle), float(middle))
