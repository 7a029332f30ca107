"""Finding the smallest budget that holds a target, from as few measurements as can be."""

import math
from dataclasses import dataclass, field

LEAST, MOST = 0.001, 0.95  # shares: six tokens of a short document, and more is no choice


@dataclass
class BudgetSearch:
    """Proposes shares to measure; gain rises with the share, nearly.

    Walks from `start` in steps of a factor, each longer than the one before, until shares that hold the target and fail
    it lie on both sides; then cuts between them until they are within `ratio` of one another. It ends early with a
    share that gains no more than `slack` above the target. The target may be changed between two proposals: what was
    measured stays known.
    """

    target: float
    start: float
    step: float
    ratio: float
    slack: float = 0.0
    gains: dict[float, float] = field(default_factory=dict)

    @property
    def high(self) -> float | None:
        """The smallest share that was measured to hold the target."""
        return min((share for share, gain in self.gains.items() if gain >= self.target), default=None)

    @property
    def best(self) -> float:
        """`high`, or the share that was measured to gain most where none holds the target."""
        return max(self.gains, key=self.gains.__getitem__) if self.high is None else self.high

    @property
    def low(self) -> float | None:
        """The largest share below `high` that was measured to fail it."""
        high = self.high
        failing = (share for share, gain in self.gains.items() if gain < self.target)
        return max((share for share in failing if high is None or share < high), default=None)

    def propose(self) -> float | None:
        """The share to measure next; None when there is nothing more to learn."""
        share = rounded(self._next())
        return None if share in self.gains or self._is_close() else share

    def guess(self) -> float:
        """Where the target is likely to be held, by what is known; where most is gained if nothing holds it."""
        low, high = self.low, self.high
        return self.best if low is None or high is None else self._between(low, high)

    def _is_close(self) -> bool:
        low, high = self.low, self.high
        if high is not None and self.slack and self.gains[high] <= self.target + self.slack:
            return True
        return low is not None and high is not None and high / low <= self.ratio

    def _next(self) -> float:
        low, high = self.low, self.high
        if low is not None and high is not None:
            return self._between(low, high)
        if not self.gains:
            return self.start
        stride = max(self.step, (max(self.gains) / min(self.gains)) ** 2)
        return max(self.gains) * stride if high is None else high / stride

    def _between(self, low: float, high: float) -> float:
        """By the slope between two shares, but well inside them, for the slope may change."""
        below, above = self.gains[low], self.gains[high]
        part = (self.target - below) / (above - below)
        return low * math.pow(high / low, min(0.75, max(0.25, part)))


def rounded(share: float) -> float:
    """A share between the least and the most, to three digits, upwards so that a target that is just held stays so."""
    share = min(MOST, max(LEAST, share))
    digits = 2 - math.floor(math.log10(share))
    scale = math.pow(10, digits)
    return math.ceil(round(share * scale, 6)) / scale
