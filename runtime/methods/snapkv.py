"""SnapKV (arXiv 2404.14469): keeps the tokens that the prompt's last queries attend to, for all later steps.

The attention probabilities of an observation window of queries are summed and pooled along positions, so that the
neighbours of an important token are kept with it. In the paper, the window is at the end of the prompt, which ends with
the question. Here the document is prefilled before the question. Before a question, the window has the last of the
document's observed queries (`load_observed`, the first half of the tail). When a question is prefilled, the window has
the question's last queries. The answer's tokens use the ranking by these queries, until `forget_question`.

There are two differences from the published code. One selection serves all query heads of a group, by the mean of their
pooled sums. For the document's window, the softmax is over the middle alone, because the keys of sinks and tail are not
available then.
"""

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from sparsekv.formats.errors import UsageError, check_at_least_one, check_choice
from sparsekv.kernels.scores.logits import attention_logits, softmax_beside
from sparsekv.runtime.selection.interface import (
    Budget,
    ConversationState,
    Method,
    MiddleContext,
    Queries,
    Selection,
    methods,
)
from sparsekv.runtime.selection.token_choice import KeptTokens, ranking

POOLING = ("max", "average")


@methods.register("snapkv")
@dataclass(frozen=True)
class SnapKV(Method):
    """Keeps the tokens that a window of queries attends to, and their neighbours."""

    window_queries: int = field(
        default=32, metadata={"help": "How many of the last queries rank the tokens (the observation window)."}
    )
    pool_size: int = field(
        default=7, metadata={"help": "Number of neighbouring tokens whose scores are pooled, odd; 1: no pooling."}
    )
    pooling: str = field(
        default="max",
        metadata={"unless": {"pool_size": 1}, "help": f"How neighbours' scores are pooled: {', '.join(POOLING)}."},
    )

    def __post_init__(self) -> None:
        check_at_least_one(self, "window_queries")
        if self.pool_size < 1 or self.pool_size % 2 == 0:
            raise UsageError(f"--pool-size {self.pool_size}: give an odd number, such as 7, or 1 for no pooling")
        check_choice("--pooling", self.pooling, POOLING)

    def prepare(self, context: MiddleContext) -> "SnapKVSelector":
        """Create the selector of a layer. Allocates one int64 per token and head, and two after a question.

        Ranking allocates the window's logits of all M keys.
        """
        return SnapKVSelector(self, context)


class SnapKVSelector(KeptTokens):
    """Selects the first tokens of the ranking `order` [Hk, M].

    The document's observed queries are those of the first half of the tail. Before a question, `order` is
    `document_order` [Hk, M], the ranking by the last of them. After a question, it is that by the question's last
    queries.
    """

    def __init__(self, method: SnapKV, context: MiddleContext):
        self.method, self.keys, self.facts = method, context.keys, context.facts
        observed = context.load_observed()
        nothing = torch.full(observed.shape[:3], -torch.inf, device=observed.device)
        self.document_order = self._ranking(observed, nothing)
        super().__init__(self.document_order)
        self.version = 0

    def _ranking(self, query: torch.Tensor, exact_logsumexp: torch.Tensor) -> torch.Tensor:
        """Rank the M tokens between sinks and tail by the last of the queries [Hk, G, Q, D]; return [Hk, M].

        `exact_logsumexp` [Hk, G, Q] is the log-sum-exp of the queries' logits on all other tokens.
        """
        window = slice(-self.method.window_queries, None)
        logits = attention_logits(query[:, :, window], self.keys, *self.facts.scaling)
        summed = softmax_beside(logits, exact_logsumexp[..., window]).sum(2)
        return ranking(_pooled(summed, self.method.pool_size, self.method.pooling).mean(1))

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select by the current ranking. A question's queries first replace the ranking, also for its answer."""
        if queries.joint:
            self.observe(queries)
        return super().select(queries, budget)

    @property
    def conversation(self) -> ConversationState:
        return ConversationState(self.forget_question, self.observe)

    def observe(self, queries: Queries) -> None:
        """Replace the ranking by the ranking of the question's last queries."""
        self.order, self.version = self._ranking(queries.query, queries.exact_logsumexp()), self.version + 1

    def forget_question(self) -> None:
        """Restore the ranking by the document's observed queries."""
        self.order, self.version = self.document_order, self.version + 1

    def graph_state(self) -> int:
        """Return a version that changes whenever the ranking does, because each ranking is another tensor."""
        return self.version


def _pooled(scores: torch.Tensor, size: int, pooling: str) -> torch.Tensor:
    """Pool scores [Hk, G, M] along M. An average counts positions beyond the ends as 0, as in the published code."""
    if pooling == "max":
        return functional.max_pool1d(scores, size, stride=1, padding=size // 2)
    return functional.avg_pool1d(scores, size, stride=1, padding=size // 2)
