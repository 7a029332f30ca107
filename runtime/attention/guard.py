"""The share of attention that a step leaves to centroids or drops, and what to do when that is too much.

The denominators of a step tell it: N_i exp(q C_i) of every cluster that is not attended token by token, against the sum
of everything (Multipole Attention, equation 1). It is an estimate, and mostly a low one: by Jensen's inequality a
cluster's tokens have at least the weight of as many centroids.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.schema import LayerFacts
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.interface import Asked, Method, Remainder, Selection

RAISES = 2  # times that a budget is doubled before a head reads everything


def remainder_logsumexp(asked: Asked, remainders: tuple[Remainder, ...], facts: LayerFacts) -> torch.Tensor:
    """[Hk, G, Q] float32: the log-sum-exp that centroids give to the tokens they stand for."""
    logits = [
        attention_logits(asked.query, one.keys, facts.softmax_scale, facts.softcap) + one.log_counts[:, None]
        for one in remainders
    ]
    return torch.cat(logits, -1).logsumexp(-1)


def missed_share(chosen: Selection, asked: Asked, attended: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
    """[Hk, Q]: the share of the whole softmax that a choice leaves, mean over the group; NaN where no one can tell.

    It is what stands for what was not chosen or, where nothing does, what the method estimates that it dropped.

    Args:
        attended: [Hk, G, Q], the log-sum-exp of all that is attended, what stands for others with it.
    """
    remainders = chosen.replacements or (chosen.dropped() if chosen.dropped else ())
    if not remainders:
        return torch.full_like(attended[:, 0], torch.nan)
    left = remainder_logsumexp(asked, remainders, facts)
    whole = attended if chosen.replacements else torch.logaddexp(attended, left)
    return (left - whole).exp().mean(1)


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
class Held:
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

    def hold(
        self,
        attempt: Callable[[Budget], Attempt],
        dense: Callable[[torch.Tensor], Attempt],
        budget: Budget,
        middle: int,
    ) -> Held:
        """Double the budget for the heads that miss too much, then let those read everything that still do.

        One sync for each attempt: what is read next depends on it.

        Args:
            dense: gives the whole attention of the heads where its argument [Hk] is True; anything for the others.
        """
        held, tokens = attempt(budget), budget.tokens(middle)
        raised = over = held.missed > self.share
        for _ in range(RAISES):
            tokens *= 2
            if tokens >= middle or not over.any():
                break
            held = held.replaced_where(over, attempt(Budget(tokens)))
            over = held.missed > self.share
        if over.any():
            held = held.replaced_where(over, dense(over.any(1)))
        return Held(held, raised, over)


@dataclass
class Gauge:
    """What one layer's queries left, summed since `reset`: heads of a query, their missed share, and how many of them a
    guard gave more, or everything."""

    guard: Guard | None
    heads: int = 0
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    def reset(self) -> None:
        self.heads, self.sums = 0, torch.zeros_like(self.sums)

    def add(self, held: Held) -> None:
        self.heads += held.raised.numel()
        parts = (held.attempt.missed, held.raised, held.dense)
        self.sums = self.sums.to(held.raised.device) + torch.stack([part.sum(dtype=torch.float64) for part in parts])

    def means(self) -> tuple[float, float, float]:
        """Mean missed share, and shares of the heads that were given more and everything; one sync."""
        missed, raised, dense = (self.sums / max(1, self.heads)).tolist()
        return missed, raised, dense
