"""Loki (arXiv 2406.02542): logits of all keys from the first principal components of the keys.

Keys are taken as they are attended, after RoPE. The paper calibrates the components on another corpus, once a model;
here they are those of the document's own middle keys, per KV head, found when a layer is made ready. The paper ranks
keys for each query head, where what is the same for all keys does not count; here one choice is for the group, so the
rest of a logit, left out by the components, counts as that of the mean key.
"""

from dataclasses import dataclass, field

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.context import MiddleContext
from sparsekv.runtime.selection.interface import Method, Selector
from sparsekv.runtime.selection.queries import Queries
from sparsekv.runtime.selection.registry import methods
from sparsekv.runtime.selection.selection import Selection
from sparsekv.runtime.selection.token_choice import group_probability, top_tokens


@methods.register("loki")
@dataclass(frozen=True)
class Loki(Method):
    """Reads the first components of all keys."""

    dims: int = field(
        default=16, metadata={"help": "Principal components of each head's keys that are read to rank them."}
    )

    def __post_init__(self) -> None:
        if self.dims < 1:
            raise UsageError(f"--dims {self.dims}: give at least 1")

    def prepare(self, context: MiddleContext) -> "LokiSelector":
        """Allocates the components [Hk, M, d] in the keys' dtype, and once the keys in float64."""
        return LokiSelector(context, self.dims)


class LokiSelector(Selector):
    """basis [Hk, D, d] float32, the directions of highest variance; reduced [Hk, M, d]; mean [Hk, 1, D]."""

    def __init__(self, context: MiddleContext, dims: int):
        keys, self.facts = context.keys, context.facts
        exact = keys.double()
        mean = exact.mean(1, keepdim=True)
        centred = exact - mean
        directions = torch.linalg.eigh(centred.transpose(1, 2) @ centred).eigenvectors.flip(-1)[..., :dims]
        self.mean, self.basis = mean.float(), directions.float()
        self.reduced = (centred @ directions).to(keys.dtype)
        # Of each key its components; beside them the components themselves and the mean.
        self.index_rows = self.reduced[0].numel() / keys.shape[2] + self.basis.shape[2] + 1

    def estimates(self, query: torch.Tensor) -> torch.Tensor:
        """[Hk, G, Q, M] float32 for queries [Hk, G, Q, D]."""
        turned = query.float() @ self.basis[:, None]
        logits = attention_logits(turned, self.reduced, self.facts.softmax_scale)
        logits = logits + attention_logits(query.float(), self.mean, self.facts.softmax_scale)
        return logits if self.facts.softcap is None else self.facts.softcap * torch.tanh(logits / self.facts.softcap)

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """By probabilities from the estimates."""
        tokens = budget.tokens(self.reduced.shape[1])
        return top_tokens(group_probability(self.estimates(queries.query), queries), tokens, self.index_rows)
