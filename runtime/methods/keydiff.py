"""KeyDiff (arXiv 2504.15364): keeps the keys that are least similar to the mean key, independently of the query.

A key's score is minus the cosine of the key and the mean of the normalised keys. The paper evicts keys block by block
during the prefill, with the mean over the remaining keys. Here the mean is computed once, over the keys of all tokens
between sinks and tail.
"""

from dataclasses import dataclass

from sparsekv.kernels.scores.logits import keydiff_scores
from sparsekv.runtime.selection.interface import Method, MiddleContext, methods
from sparsekv.runtime.selection.token_choice import KeptTokens, ranking


@methods.register("keydiff")
@dataclass(frozen=True)
class KeyDiff(Method):
    """Keeps the tokens whose keys have the lowest cosine with the mean direction."""

    def prepare(self, context: MiddleContext) -> KeptTokens:
        """Create the selector of a layer.

        Allocates one int64 per token and head, and temporarily up to two copies of the keys in float32.
        """
        return KeptTokens(ranking(keydiff_scores(context.keys)))
