"""SnapKV (arXiv 2404.14469): keeps what the last queries of the prompt attend to, for all steps that follow.

The probabilities of an observation window of queries are summed and pooled along positions, so that the neighbours of
a token that matters are kept with it. In the paper the window ends the prompt, and the prompt ends with the question.
Here a question comes later: until one does, the window is the last of the prompt's queries that a method may learn
from, and when one is prefilled, its own last queries are; what they choose is kept until the question is forgotten.

As published, but for this: one choice serves the query heads of a group, by the mean of their pooled sums. Sinks and
tail are not at hand when the prompt's own window is ranked: its probabilities are of the middle alone.
"""

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from sparsekv.formats.errors import UsageError
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.kernels.scores.softmax import softmax_beside
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.context import MiddleContext
from sparsekv.runtime.selection.interface import Method
from sparsekv.runtime.selection.kept_tokens import KeptTokens, ranking
from sparsekv.runtime.selection.queries import Queries
from sparsekv.runtime.selection.registry import methods
from sparsekv.runtime.selection.selection import Selection

POOLING = ("max", "average")


@methods.register("snapkv")
@dataclass(frozen=True)
class SnapKV(Method):
    """Keeps the tokens that a window of queries attends to, and their neighbours."""

    window_queries: int = field(
        default=32, metadata={"help": "How many of the last queries rank the tokens (the observation window)."}
    )
    pool_size: int = field(
        default=7, metadata={"help": "Neighbouring tokens whose scores are pooled, an odd number; 1: no pooling."}
    )
    pooling: str = field(default="max", metadata={"help": f"How neighbours' scores are pooled: {', '.join(POOLING)}."})

    def __post_init__(self) -> None:
        if self.window_queries < 1:
            raise UsageError(f"--window-queries {self.window_queries}: give at least 1")
        if self.pool_size < 1 or self.pool_size % 2 == 0:
            raise UsageError(f"--pool-size {self.pool_size}: give an odd number, such as 7, or 1 for no pooling")
        if self.pooling not in POOLING:
            raise UsageError(f"--pooling {self.pooling}: choose one of {', '.join(POOLING)}")

    def prepare(self, context: MiddleContext) -> "SnapKVSelector":
        """Keeps two numbers a token and head; ranking allocates the window's logits over the middle."""
        return SnapKVSelector(self, context)


class SnapKVSelector(KeptTokens):
    """order [Hk, M] of the window that was last seen, unasked [Hk, M] of the prompt's."""

    def __init__(self, method: SnapKV, context: MiddleContext):
        assert context.observed is not None
        self.method, self.keys, self.facts = method, context.keys, context.facts
        nothing = torch.full(context.observed.shape[:3], -torch.inf, device=context.keys.device)
        self.unasked = self._ranking(context.observed, nothing)
        super().__init__(self.unasked)
        self.asked = 0

    def _ranking(self, query: torch.Tensor, exact_logsumexp: torch.Tensor) -> torch.Tensor:
        """[Hk, M], from the last of some queries [Hk, G, Q, D] and the log-sum-exp [Hk, G, Q] of what else they see."""
        window = slice(-self.method.window_queries, None)
        logits = attention_logits(query[:, :, window], self.keys, self.facts.softmax_scale, self.facts.softcap)
        summed = softmax_beside(logits, exact_logsumexp[..., window]).sum(2)
        return ranking(_pooled(summed, self.method.pool_size, self.method.pooling).mean(1))

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """A question attends to what its own window chooses; each later token to the same."""
        if queries.joint:
            self.observe(queries)
        return super().select(queries, budget)

    def observe(self, queries: Queries) -> None:
        """From now on what this question's window chooses is kept."""
        self.order, self.asked = self._ranking(queries.query, queries.exact_logsumexp()), self.asked + 1

    def forget_question(self) -> None:
        """Back to what the prompt's own window chose."""
        self.order, self.asked = self.unasked, self.asked + 1

    def graph_state(self) -> int:
        """Another number for each question."""
        return self.asked


def _pooled(scores: torch.Tensor, size: int, pooling: str) -> torch.Tensor:
    """[Hk, G, M]; what lies beyond the ends counts as 0 in an average, as in the published code."""
    if pooling == "max":
        return functional.max_pool1d(scores, size, stride=1, padding=size // 2)
    return functional.avg_pool1d(scores, size, stride=1, padding=size // 2)
