"""QuoKA (section 4.4 of the paper, on decoding): selection of the keys of highest cosine similarity to the query.

QuoKA reads every key.

The tokens of a question share one selection. By default the selection uses only the few queries that are least similar
to the question's mean query, as QuoKA does for a chunk of a document's prefill. In a decode step, the selection uses
the step's only query.
"""

from dataclasses import dataclass
from typing import ClassVar

from sparsekv.formats.index.schema import QuokaOptions
from sparsekv.kernels.scores.quoka import key_norms, quoka_scores, subselect_queries
from sparsekv.runtime.selection.interface import Budget, Method, MiddleContext, Queries, Selection, Selector, methods
from sparsekv.runtime.selection.token_choice import top_tokens


@methods.register("quoka")
@dataclass(frozen=True)
class Quoka(QuokaOptions, Method):
    """Ranks keys by their similarity to the queries, by default the cosine, averaged over the group."""

    reads_all_keys: ClassVar[bool] = True

    def prepare(self, context: MiddleContext) -> "QuokaSelector":
        """Create the selector of a layer. Allocates one norm per key and head."""
        return QuokaSelector(self, context)


class QuokaSelector(Selector):
    """Selects by the similarity of queries and keys [Hk, M, D], with the keys' norms [Hk, M]."""

    def __init__(self, method: Quoka, context: MiddleContext):
        self.method, self.keys, self.norms = method, context.keys, key_norms(context.keys)

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select the keys of highest similarity. Allocates scores [Hk, Q, M] float32 for the Q queries that select."""
        how, middle = self.method, self.keys.shape[1]
        query, across = queries.query, "none"
        if queries.joint:
            query, across = subselect_queries(query, how.prefill_queries, how.quoka_subset), how.quoka_across
        scores = quoka_scores(query, self.keys, self.norms, how.quoka_similarity, across)
        return top_tokens(scores, budget.tokens(middle), float(middle))
