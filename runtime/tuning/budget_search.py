"""Searches for the smallest budget that meets a target, with few measurements."""

import math
from dataclasses import dataclass, field

LEAST, MOST = 0.001, 0.95  # shares: six tokens of a short document; nearly everything, where selecting saves nothing


@dataclass
class BudgetSearch:
    """Proposes shares to measure, assuming that the gain mostly rises with the share.

    Walks from `start` by growing factors until one share meets the target and a smaller one fails it, then bisects
    until the two are within a factor `ratio`. It ends early at a share whose gain is at most `slack` above the target.
    The target may be changed between two proposals; measurements are kept.
    """

    target: float
    start: float
    step: float
    ratio: float
    slack: float = 0.0
    gains: dict[float, float] = field(default_factory=dict)

    @property
    def high(self) -> float | None:
        """The smallest measured share that meets the target."""
        return min((share for share, gain in self.gains.items() if gain >= self.target), default=None)

    @property
    def best(self) -> float:
        """`high`, or the measured share of most gain where none meets the target."""
        return max(self.gains, key=self.gains.__getitem__) if self.high is None else self.high

    @property
    def low(self) -> float | None:
        """The largest measured share below `high` that fails the target."""
        high = self.high
        failing = (share for share, gain in self.gains.items() if gain < self.target)
        return max((share for share in failing if high is None or share < high), default=None)

    def propose(self) -> float | None:
        """The share to measure next; None when the search is done."""
        share = rounded(self._next())
        return None if share in self.gains or self._is_close() else share

    def guess(self) -> float:
        """The share that probably just meets the target, by interpolation; `best` if the target is not bracketed."""
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
        """Interpolates on a log scale, but well inside the two shares, because the slope may change between them."""
        below, above = self.gains[low], self.gains[high]
        part = (self.target - below) / (above - below)
        return low * math.pow(high / low, min(0.75, max(0.25, part)))


def rounded(share: float) -> float:
    """A share between LEAST and MOST, rounded up to three digits, so that a target that is just met stays met."""
    share = min(MOST, max(LEAST, share))
    digits = 2 - math.floor(math.log10(share))
    scale = math.pow(10, digits)
    return math.ceil(round(share * scale, 6)) / scale
