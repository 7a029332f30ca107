"""H2O (arXiv 2306.14048): keeps the heavy hitters, the tokens with the most attention in the prompt's prefill.

There are two differences from the paper. The paper spends half of its budget on the most recent tokens. Here these
tokens are always attended to as the tail, and the whole budget is spent on heavy hitters. The paper evicts tokens step
by step and also sums the attention of the answer's queries. Here tokens are ranked once, by sums over a sample of the
document's queries (`--query-sample`).
"""

from dataclasses import dataclass
from typing import ClassVar

from sparsekv.runtime.selection.interface import Method, MiddleContext, methods
from sparsekv.runtime.selection.token_choice import KeptTokens, ranking


@methods.register("h2o")
@dataclass(frozen=True)
class H2O(Method):
    """Keeps the tokens of highest attention, summed over a sample of the document's queries."""

    needs_index: ClassVar[bool] = True
    learns_queries: ClassVar[bool] = True

    def prepare(self, context: MiddleContext) -> KeptTokens:
        """Create the selector of a layer. Allocates one int64 per token and head."""
        return KeptTokens(ranking(context.tensors["scores"]))
