"""H2O (arXiv 2306.14048): keeps the heavy hitters, the tokens that got most attention while the prompt was prefilled.

The paper spends half of its budget on the most recent tokens: those are the exact tail here, and the budget is all of
heavy hitters. It evicts step by step, and adds up the attention of the answer's queries too; here nothing is evicted
before the prompt's attention is summed, and the sums stay as they are while the model decodes.
"""

from dataclasses import dataclass
from typing import ClassVar

from sparsekv.runtime.selection.context import MiddleContext
from sparsekv.runtime.selection.interface import Method
from sparsekv.runtime.selection.kept_tokens import KeptTokens, ranking
from sparsekv.runtime.selection.registry import methods


@methods.register("h2o")
@dataclass(frozen=True)
class H2O(Method):
    """Keeps the tokens of highest attention, summed over the prompt's queries."""

    needs_index: ClassVar[bool] = True
    learns_queries: ClassVar[bool] = True

    def prepare(self, context: MiddleContext) -> KeptTokens:
        """Keeps one number a token and head."""
        return KeptTokens(ranking(context.tensors["scores"]))
