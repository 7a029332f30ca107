"""Loki (arXiv 2406.02542): estimates the logits of all keys from the keys' first principal components.

Keys are used after RoPE. The paper computes the components once per model, from another corpus. Here they are computed
from the document's middle keys, per KV head, when a layer is prepared. The paper ranks keys for each query head, and so
a logit offset common to all keys does not matter. Here one selection serves the query heads of a group, and so the mean
key's logit is added to the estimates.
"""

from dataclasses import dataclass, field

import torch

from sparsekv.formats.errors import check_at_least_one
from sparsekv.kernels.scores.logits import attention_logits, softcapped
from sparsekv.runtime.selection.interface import Budget, Method, MiddleContext, Queries, Selection, Selector, methods
from sparsekv.runtime.selection.token_choice import check_channels, group_probability, top_tokens


@methods.register("loki")
@dataclass(frozen=True)
class Loki(Method):
    """Ranks all keys by their first principal components."""

    dims: int = field(
        default=16,
        metadata={
            "help": "Number of principal components of a head's keys by which tokens are ranked; at most the head's "
            "channels."
        },
    )

    def __post_init__(self) -> None:
        check_at_least_one(self, "dims")

    def prepare(self, context: MiddleContext) -> "LokiSelector":
        """Create the selector of a layer.

        Allocates [Hk, M, d] in the keys' dtype, and temporarily two copies of the keys in float64.

        Raises:
            UsageError: heads have fewer channels than `dims`.
        """
        check_channels("--dims", self.dims, Loki.dims, context.keys.shape[2])
        return LokiSelector(context, self.dims)


class LokiSelector(Selector):
    """Selects by logits that are estimated along the directions of highest variance of the keys.

    `basis` [Hk, D, d] float32 holds these d directions. `reduced` [Hk, M, d] are the keys' components along the
    directions. `mean` [Hk, 1, D] float32 is the mean key.
    """

    def __init__(self, context: MiddleContext, dims: int):
        keys, self.facts = context.keys, context.facts
        exact = keys.double()
        mean = exact.mean(1, keepdim=True)
        centred = exact - mean
        directions = torch.linalg.eigh(centred.transpose(1, 2) @ centred).eigenvectors.flip(-1)[..., :dims]
        self.mean, self.basis = mean.float(), directions.float()
        self.reduced = (centred @ directions).to(keys.dtype)
        # A selection reads the reduced keys, the basis and the mean key.
        self.index_rows = self.reduced[0].numel() / keys.shape[2] + self.basis.shape[2] + 1

    def estimates(self, query: torch.Tensor) -> torch.Tensor:
        """Estimate the logits [Hk, G, Q, M] float32 of queries [Hk, G, Q, D]."""
        projected = query.float() @ self.basis[:, None]
        logits = attention_logits(projected, self.reduced, self.facts.softmax_scale)
        logits = logits + attention_logits(query.float(), self.mean, self.facts.softmax_scale)
        return softcapped(logits, self.facts.softcap)

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select the tokens of highest estimated probability."""
        tokens = budget.tokens(self.reduced.shape[1])
        return top_tokens(group_probability(self.estimates(queries.query), queries), tokens, self.index_rows)
