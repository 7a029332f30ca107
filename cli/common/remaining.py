"""Estimate the time that is left of a stage, from the times of its steps so far."""

import time
from collections.abc import Callable

MINUTE = 60.0


class Remaining:
    """Estimates the remaining time of one stage from the times of its steps so far.

    The steps of a dense prefill become slower, because each token attends to all earlier tokens. Therefore the time per
    step is extrapolated linearly from the mean times of the first and the second half of the steps so far. The
    extrapolated time grows at most in proportion to the number of steps.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._of = clock, 0
        self._steps: list[tuple[float, int]] = []

    def show(self, done: int, of: int) -> None:
        """Record that `done` of `of` steps are done. A smaller `done` than in the last call restarts the estimate."""
        if self._steps and done < self._steps[-1][1]:
            self._steps = []
        if not self._steps or done > self._steps[-1][1]:
            self._steps.append((self._clock(), done))
        self._of = of

    def seconds(self) -> float | None:
        """Return the remaining seconds from now on; None before two calls of `show` and after the last step."""
        if len(self._steps) < 2 or self._steps[-1][1] >= self._of:
            return None
        first, middle, last = self._steps[0], self._steps[(len(self._steps) - 1) // 2], self._steps[-1]
        now, place = _pace(middle, last)
        ahead = (last[1] + self._of) / 2
        pace = now
        if middle != first:
            before, earlier = _pace(first, middle)
            slope = max(0.0, (now - before) / (place - earlier))
            pace = min(now + slope * (ahead - place), now * ahead / place)
        return max(0.0, pace * (self._of - last[1]) - (self._clock() - last[0]))

    def told(self) -> str:
        """Return the estimate as text, such as `about 3 min left`; empty without one, or once its time has passed."""
        seconds = self.seconds()
        if not seconds:
            return ""
        return f"about {seconds / MINUTE:.0f} min left" if seconds >= 1.5 * MINUTE else f"about {seconds:.0f} s left"


def _pace(start: tuple[float, int], end: tuple[float, int]) -> tuple[float, float]:
    """Return the seconds per step between two points (seconds, steps), and the steps half-way between them."""
    return (end[0] - start[0]) / (end[1] - start[1]), (start[1] + end[1]) / 2
