"""Confidence intervals by a two-level bootstrap over contexts and their questions.

Both are resampled because questions about one context are not independent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Scores = Sequence[Sequence[float]]
"""Scores by context, then by question."""

REPLICATES = 4000


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95% confidence interval."""

    value: float
    low: float
    high: float


def interval(scores: Scores, summary: Callable[[float], float] = float, *, seed: int = 0) -> Interval:
    """The interval of the mean over all questions.

    Args:
        summary: an increasing function of the mean, whose value and interval are returned.
    """
    means = _means([scores], seed)[0]
    return _interval(summary(_mean(scores)), np.vectorize(summary)(means))


def paired_difference(
    scores: Scores, baseline: Scores, summary: Callable[[float], float] = float, *, seed: int = 0
) -> Interval:
    """The interval of the difference of two means (scores minus baseline) on the same questions.

    Each replicate draws the same questions for both, so that a question's difficulty cancels.

    Raises:
        ValueError: the scores are not for the same questions.
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
    """Means [replicates] for each of `paired`, over the same contexts and questions drawn with replacement."""
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
