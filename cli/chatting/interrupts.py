"""Ctrl-C while a chat is open: it stops an answer, or what else is being done, and never the chat."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Handles Ctrl-C. An answer that has begun ends after its next token, so that the cache stays whole; all else, and
    the second Ctrl-C of one answer, is a KeyboardInterrupt.

    `came`: whether it was pressed since `reset`, also where a library lost the KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.came = self._answering = self._begun = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Within the context Ctrl-C comes here; where it was ignored (nohup) it stays so."""
        before = signal.getsignal(signal.SIGINT)
        if before is signal.SIG_IGN:
            yield
            return
        signal.signal(signal.SIGINT, self._take)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def reset(self) -> None:
        """Begin with another question or command."""
        self.came = False

    @contextmanager
    def answering(self) -> Iterator[Callable[[], bool]]:
        """Yields what is to be asked after each token of an answer: whether to stop."""
        self._answering, self._begun = True, False
        try:
            yield self._stop
        finally:
            self._answering = False

    def _stop(self) -> bool:
        self._begun = True
        return self.came

    def _take(self, number: int, frame: FrameType | None) -> None:
        first, self.came = not self.came, True
        if not (first and self._answering and self._begun):
            raise KeyboardInterrupt
