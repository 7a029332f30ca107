"""Confidence intervals by bootstrap over contexts and their questions, which are not independent of one another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Scores = Sequence[Sequence[float]]
"""Scores by context, then by question."""

REPLICATES = 4000


@dataclass(frozen=True)
class Interval:
    """An estimate and the interval that holds the true value at 95%."""

    value: float
    low: float
    high: float


def interval(scores: Scores, summary: Callable[[float], float] = float, *, seed: int = 0) -> Interval:
    """Of the mean over all questions.

    Args:
        summary: told of the mean; rising.
    """
    means = _means([scores], seed)[0]
    return _interval(summary(_mean(scores)), np.vectorize(summary)(means))


def paired_difference(
    scores: Scores, baseline: Scores, summary: Callable[[float], float] = float, *, seed: int = 0
) -> Interval:
    """Of the mean of some scores less that of others on the same questions: each replicate draws both alike, so that
    what makes a question hard for both cancels.

    Raises:
        ValueError: they are not of the same questions.
    """
    if [len(one) for one in scores] != [len(one) for one in baseline]:
        raise ValueError("paired scores must be of the same questions")
    told = np.vectorize(summary)
    means, others = _means([scores, baseline], seed)
    return _interval(summary(_mean(scores)) - summary(_mean(baseline)), told(means) - told(others))


def _mean(scores: Scores) -> float:
    return float(np.mean(np.concatenate([np.asarray(one, float) for one in scores])))


def _interval(value: float, replicates: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(replicates, [0.025, 0.975])
    return Interval(value, float(low), float(high))


def _means(paired: Sequence[Scores], seed: int) -> list[NDArray[np.float64]]:
    """Means [replicates] of each, over the same contexts drawn with replacement, and questions drawn within them."""
    sizes = np.array([len(one) for one in paired[0]])
    tables = [np.zeros((len(sizes), sizes.max())) for _ in paired]
    for table, scores in zip(tables, paired, strict=True):
        for row, one in zip(table, scores, strict=True):
            row[: len(one)] = one
    random = np.random.default_rng(seed)
    drawn = random.integers(len(sizes), size=(REPLICATES, len(sizes)))
    count = sizes[drawn]
    questions = (random.random((*drawn.shape, sizes.max())) * count[..., None]).astype(np.int64)
    inside = np.arange(sizes.max()) < count[..., None]
    return [(table[drawn[..., None], questions] * inside).sum((1, 2)) / count.sum(1) for table in tables]
