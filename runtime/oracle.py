"""The oracle: the tokens of highest exact attention probability. Reads every key; the bound on what a choice can do."""

from dataclasses import dataclass

import torch

from sparsekv.kernels.lookup import attention_logits
from sparsekv.runtime.budget import Budget
from sparsekv.runtime.methods import Asked, Method, MiddleContext, Selection, Selector, register


@register("oracle")
@dataclass(frozen=True)
class Oracle(Method):
    """Exact top-K of the group's mean probability."""

    def prepare(self, context: MiddleContext) -> "OracleSelector":
        """Allocates nothing; each choice allocates the logits over the middle."""
        return OracleSelector(context)


class OracleSelector(Selector):
    """keys [Hk, M, D]."""

    def __init__(self, context: MiddleContext):
        self.keys, self.facts = context.keys, context.facts

    def select(self, asked: Asked, budget: Budget) -> Selection:
        """Probabilities are of the whole softmax, what is attended exactly included, so that heads weigh rightly."""
        logits = attention_logits(asked.query, self.keys, self.facts.softmax_scale, self.facts.softcap)
        total = torch.logaddexp(logits.logsumexp(-1), asked.exact_logsumexp())
        probability = (logits - total[..., None]).exp().mean(1)
        probability = probability.mean(1, keepdim=True) if asked.shared else probability
        tokens = budget.tokens(self.keys.shape[1])
        starts = probability.topk(tokens, -1).indices
        # A bound knows what it read only in hindsight: the index is counted as free.
        return Selection(starts, torch.ones_like(starts), tokens, 0.0)
