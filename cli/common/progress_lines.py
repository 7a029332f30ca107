"""A line on stderr from time to time, so that a long run is not silent: of progress off a terminal, and of loading."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 10.0
"""Seconds from one line to the next."""


_telling: "list[ProgressLines]" = []


def telling() -> "ProgressLines | None":
    """Those that tell already, if any do: there should be one line at a time."""
    return _telling[-1] if _telling else None


class ProgressLines:
    """Tells every `EVERY` seconds how far the stage that was shown last is; use it as a context manager.

    Args:
        tell: prints a line.
        before: what is told before the first stage was shown.
    """

    def __init__(self, tell: Callable[[str], None], before: str = "at work"):
        self._tell, self._before, self._ended = tell, before, threading.Event()
        self._stage, self._done, self._of, self._began = "", 0, 0, time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def show(self, stage: str, done: int, of: int) -> None:
        """Remember how far a stage is."""
        # What follows a stage that has ended may show nothing for long: its time is not the stage's.
        if stage != self._stage or done >= of:
            self._began = time.monotonic()
        self._stage, self._done, self._of = stage, done, of

    def line(self) -> str:
        """What there is to tell now."""
        seconds = time.monotonic() - self._began
        if not self._stage:
            return f"{self._before}, {seconds:.0f} s"
        if self._done >= self._of:
            return f"{self._stage}: all {self._of:,}; at work on what follows, {seconds:.0f} s"
        return f"{self._stage}: {self._done:,} of {self._of:,}, {seconds:.0f} s"

    def __enter__(self) -> "ProgressLines":
        self._thread.start()
        _telling.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _telling.remove(self)
        self._ended.set()
        self._thread.join()

    @contextmanager
    def instead(self, what: str) -> Iterator[None]:
        """Within it, what is going on is told in the place of the stage that was shown last."""
        kept = self._before, self._stage, self._done, self._of
        self._before, self._stage, self._began = what, "", time.monotonic()
        try:
            yield
        finally:
            self._before, self._stage, self._done, self._of = kept
            self._began = time.monotonic()

    def _run(self) -> None:
        while not self._ended.wait(EVERY):
            self._tell(self.line())
