"""H2O (arXiv 2306.14048): keeps the heavy hitters, the tokens with the most attention in the prompt's prefill.

Differences from the paper: it spends half of its budget on the most recent tokens; here those are the exact tail, and
the whole budget is heavy hitters. It evicts step by step and also sums the attention of the answer's queries; here
tokens are ranked once, by the sums over a sample of the document's queries (`--query-sample`).
"""

from dataclasses import dataclass
from typing import ClassVar

from sparsekv.runtime.selection.interface import Method, MiddleContext
from sparsekv.runtime.selection.registry import methods
from sparsekv.runtime.selection.token_choice import KeptTokens, ranking


@methods.register("h2o")
@dataclass(frozen=True)
class H2O(Method):
    """Keeps the tokens of highest attention, summed over a sample of the document's queries."""

    needs_index: ClassVar[bool] = True
    learns_queries: ClassVar[bool] = True

    def prepare(self, context: MiddleContext) -> KeptTokens:
        """Keeps one int64 per token and head."""
        return KeptTokens(ranking(context.tensors["scores"]))
