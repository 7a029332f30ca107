"""The oracle: the tokens of highest exact attention probability. Scores every key; an upper bound for selections."""

from dataclasses import dataclass
from typing import ClassVar

from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.selection.interface import Budget, Method, MiddleContext, Queries, Selection, Selector
from sparsekv.runtime.selection.registry import methods
from sparsekv.runtime.selection.token_choice import group_probability, top_tokens


@methods.register("oracle")
@dataclass(frozen=True)
class Oracle(Method):
    """Exact top-K of the group's mean probability."""

    is_bound: ClassVar[bool] = True

    def prepare(self, context: MiddleContext) -> "OracleSelector":
        """Allocates nothing; each selection allocates the logits over the middle."""
        return OracleSelector(context)


class OracleSelector(Selector):
    """keys [Hk, M, D]."""

    def __init__(self, context: MiddleContext):
        self.keys, self.facts = context.keys, context.facts

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """The tokens of highest exact probability."""
        logits = attention_logits(queries.query, self.keys, *self.facts.scaling)
        tokens = budget.tokens(self.keys.shape[1])
        # As a bound, the cost counts only the selected tokens, and not the keys read to rank them.
        return top_tokens(group_probability(logits, queries), tokens, 0.0)
