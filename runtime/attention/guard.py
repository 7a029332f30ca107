"""Estimate of the missed mass: the attention mass of tokens that a step does not attend to individually.

A guard limits the missed mass.

The missed mass is estimated from softmax denominators. The numerator is the sum of N_i exp(q C_i) over the clusters i
of unselected tokens, for a query q and a cluster of N_i tokens with centroid C_i. The denominator is the sum over all
rows and clusters (Multipole Attention, equation 1). The estimate is usually too low: by Jensen's inequality, the N_i
tokens have at least N_i times the weight of their centroid.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import LayerFacts
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.selection.interface import Budget, CentroidSegment, Method, MethodSpec

DOUBLINGS = 2  # maximum number of times that the guard doubles a budget before a head falls back to dense attention


def missed_share(
    rest: Sequence[CentroidSegment], query: torch.Tensor, total: torch.Tensor, facts: LayerFacts, *, attended: bool
) -> torch.Tensor:
    """Estimate the softmax share [Hk, Q] of unselected tokens, as the mean over the query heads of a KV head.

    Returns NaN if there are no centroids.

    Args:
        rest: centroids of the tokens that were not selected.
        query: [Hk, G, Q, D].
        total: [Hk, G, Q], the log-sum-exp of the logits of all attended rows and centroids.
        attended: whether the step attends to these centroids, so that `total` includes them.
    """
    if not rest:
        return torch.full_like(total[:, 0], torch.nan)
    logits = [attention_logits(query, part.keys, *facts.scaling) + part.log_counts[:, None] for part in rest]
    left = torch.cat(logits, -1).logsumexp(-1)
    whole = total if attended else torch.logaddexp(total, left)
    return (left - whole).exp().mean(1)


def estimates_missed(method: Method, *, residual: bool) -> bool:
    """Whether the missed mass can be estimated, from the method's own centroids or from the residual's."""
    return method.estimates_missed or (residual and not method.replaces())


def check_estimates_missed(option: str, form: MethodSpec) -> None:
    """Raise UsageError if the method's missed mass, which `option` needs, cannot be estimated."""
    if not estimates_missed(form.method, residual=form.residual):
        # A method that represents unselected tokens itself cannot be combined with `--residual`.
        remedy = "use another method" if form.method.replaces() else "add --residual or use another method"
        raise UsageError(f"{option}: {form.name} cannot estimate how much attention it misses; {remedy}")


@dataclass(frozen=True)
class Attempt:
    """Results of a step at one budget.

    `missed` [Hk, Q] is the estimated missed mass. `rows` [Hk, Q] is the number of D-sized rows read of the middle and
    the index. `results` are the result tensors, each [Hk, Q, ...].
    """

    missed: torch.Tensor
    rows: torch.Tensor
    results: tuple[torch.Tensor, ...]

    def replaced_where(self, over: torch.Tensor, other: "Attempt") -> "Attempt":
        """Return an attempt with the results of `other` where `over` [Hk, Q] is True, elsewhere with this attempt's.

        Where `over` is True, the number of rows read is the sum over both attempts.
        """
        results = (
            torch.where(over.view(*over.shape, *[1] * (new.ndim - 2)), new, old)
            for old, new in zip(self.results, other.results, strict=True)
        )
        return Attempt(torch.where(over, other.missed, self.missed), self.rows + over * other.rows, tuple(results))


@dataclass(frozen=True)
class Outcome:
    """A step's results, and bool masks [Hk, Q] of the heads and queries for which the guard changed the attention.

    `raised`: the missed mass at the first budget was above the limit. `dense`: the head fell back to dense attention.
    """

    attempt: Attempt
    raised: torch.Tensor
    dense: torch.Tensor


@dataclass(frozen=True)
class Guard:
    """A limit on the missed mass, for each KV head and query of a step.

    Raises:
        UsageError: `share`, the limit, is not above 0 and below 1.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UsageError(f"--guard {self.share:g}: give a share between 0 and 1, such as 0.2")

    def enforce(
        self,
        attempt: Callable[[Budget], Attempt],
        dense: Callable[[torch.Tensor], Attempt],
        budget: Budget,
        middle: int,
    ) -> Outcome:
        """Run a step at a budget, and again at a doubled budget, up to DOUBLINGS times, while heads are over the limit.

        A head keeps its first results within the limit. Heads that stay over the limit use dense attention. A doubled
        budget of `middle` tokens or more is not tried. Each attempt costs one sync, because its result
        decides whether another attempt is needed.

        Args:
            attempt: runs the step at a budget.
            dense: runs dense attention for the heads where its argument [Hk] is True; other heads' results are ignored.
            budget: the budget of the first attempt.
            middle: number of tokens between sinks and tail.
        """
        best, tokens = attempt(budget), budget.tokens(middle)
        raised = over = best.missed > self.share
        for _ in range(DOUBLINGS):
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
    """One layer's missed-mass meter, which sums over heads and queries since `reset`.

    `heads` is the number of pairs of a KV head and a query. `sums` [3] are sums over these pairs: of the missed mass,
    of `Outcome.raised` and of `Outcome.dense`.
    """

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
        """Return the means of `sums` over the pairs of a KV head and a query; one sync.

        At least one step must have been measured since `reset`.
        """
        missed, raised, dense = (self.sums / self.heads).tolist()
        return missed, raised, dense
