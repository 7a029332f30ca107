"""The share of attention that a step leaves to centroids or drops, and what to do when that is too much.

The denominators of a step tell it: N_i exp(q C_i) of every cluster that is not attended token by token, against the sum
of everything (Multipole Attention, equation 1). It is an estimate, and mostly a low one: by Jensen's inequality a
cluster's tokens have at least the weight of as many centroids.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.schema import LayerFacts
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.interface import Method
from sparsekv.runtime.selection.selection import CentroidSegment

RAISES = 2  # times that a budget is doubled before a head reads everything


def missed_share(
    rest: Sequence[CentroidSegment], query: torch.Tensor, total: torch.Tensor, facts: LayerFacts, *, attended: bool
) -> torch.Tensor:
    """[Hk, Q]: the share of the whole softmax that a choice leaves, mean over the group; NaN where no one can tell.

    Args:
        rest: centroids of what was not chosen; `attended`: in its place, else they only estimate what was dropped.
        query: [Hk, G, Q, D].
        total: [Hk, G, Q], the log-sum-exp of all that is attended.
    """
    if not rest:
        return torch.full_like(total[:, 0], torch.nan)
    left = rest_logsumexp(rest, query, facts)
    whole = total if attended else torch.logaddexp(total, left)
    return (left - whole).exp().mean(1)


def rest_logsumexp(rest: Sequence[CentroidSegment], query: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
    """[Hk, G, Q] float32: the log-sum-exp that centroids give to the tokens they stand for."""
    logits = [
        attention_logits(query, part.keys, facts.softmax_scale, facts.softcap) + part.log_counts[:, None]
        for part in rest
    ]
    return torch.cat(logits, -1).logsumexp(-1)


def tells_missed(method: Method, *, residual: bool) -> bool:
    """Whether each choice tells what it leaves: by the method itself, or by the residual that stands for it."""
    return method.tells_missed or (residual and not method.replaces())


@dataclass(frozen=True)
class Attempt:
    """A step at one budget: its estimated missed share and the D-sized rows that it read for the middle [Hk, Q], and
    what it gave, each [Hk, Q, ...]."""

    missed: torch.Tensor
    rows: torch.Tensor
    results: tuple[torch.Tensor, ...]

    def replaced_where(self, over: torch.Tensor, other: "Attempt") -> "Attempt":
        """Another attempt's results where `over` [Hk, Q], which has then read both."""
        results = (
            torch.where(over.view(*over.shape, *[1] * (new.ndim - 2)), new, old)
            for old, new in zip(self.results, other.results, strict=True)
        )
        return Attempt(torch.where(over, other.missed, self.missed), self.rows + over * other.rows, tuple(results))


@dataclass(frozen=True)
class Outcome:
    """What a guard made of a step: the attempt, and where [Hk, Q] it raised the budget and where it read everything."""

    attempt: Attempt
    raised: torch.Tensor
    dense: torch.Tensor


@dataclass(frozen=True)
class Guard:
    """The largest share of its attention that a head of a step may leave to centroids or drop."""

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UsageError(f"--guard {self.share:g}: give a share between 0 and 1, such as 0.2")

    def check(self, name: str, method: Method, *, residual: bool) -> None:
        """Raise UsageError for a method that cannot tell what it leaves."""
        if not tells_missed(method, residual=residual):
            raise UsageError(
                f"--guard: {name} cannot tell how much attention it leaves; add --residual or use another method"
            )

    def enforce(
        self,
        attempt: Callable[[Budget], Attempt],
        dense: Callable[[torch.Tensor], Attempt],
        budget: Budget,
        middle: int,
    ) -> Outcome:
        """Double the budget for the heads that miss too much, then let those read everything that still do.

        One sync for each attempt: what is read next depends on it.

        Args:
            dense: gives the whole attention of the heads where its argument [Hk] is True; anything for the others.
        """
        best, tokens = attempt(budget), budget.tokens(middle)
        raised = over = best.missed > self.share
        for _ in range(RAISES):
            tokens *= 2
            if tokens >= middle or not over.any():
                break
            best = best.replaced_where(over, attempt(Budget(tokens)))
            over = best.missed > self.share
        if over.any():
            best = best.replaced_where(over, dense(over.any(1)))
        return Outcome(best, raised, over)


@dataclass
class MissedMeter:
    """What one layer's queries left, summed since `reset`: heads of a query, their missed share, and how many of them a
    guard gave more, or everything."""

    guard: Guard | None
    heads: int = 0
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    def reset(self) -> None:
        self.heads, self.sums = 0, torch.zeros_like(self.sums)

    def add(self, outcome: Outcome) -> None:
        self.heads += outcome.raised.numel()
        parts = (outcome.attempt.missed, outcome.raised, outcome.dense)
        self.sums = self.sums.to(outcome.raised.device) + torch.stack([part.sum(dtype=torch.float64) for part in parts])

    def means(self) -> tuple[float, float, float]:
        """Mean missed share, and shares of the heads that were given more and everything; one sync."""
        missed, raised, dense = (self.sums / max(1, self.heads)).tolist()
        return missed, raised, dense
