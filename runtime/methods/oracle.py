"""The oracle: selection of the tokens of highest exact attention probability, an upper bound of recall.

The oracle reads every key.
"""

from dataclasses import dataclass
from typing import ClassVar

from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.selection.interface import Budget, Method, MiddleContext, Queries, Selection, Selector, methods
from sparsekv.runtime.selection.token_choice import group_probability, top_tokens


@methods.register("oracle")
@dataclass(frozen=True)
class Oracle(Method):
    """Selects the top K tokens by exact probability, averaged over the group."""

    is_bound: ClassVar[bool] = True

    def prepare(self, context: MiddleContext) -> "OracleSelector":
        """Create the selector of a layer. Each selection allocates the logits of all M keys."""
        return OracleSelector(context)


class OracleSelector(Selector):
    """Selects by exact logits on the keys [Hk, M, D]."""

    def __init__(self, context: MiddleContext):
        self.keys, self.facts = context.keys, context.facts

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select the tokens of highest exact probability."""
        logits = attention_logits(queries.query, self.keys, *self.facts.scaling)
        tokens = budget.tokens(self.keys.shape[1])
        # The oracle is an upper bound, and so its cost excludes the keys that are read to rank the tokens.
        return top_tokens(group_probability(logits, queries), tokens, 0.0)
