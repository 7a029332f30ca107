"""Handle Ctrl-C at any moment with one line that says what is kept."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED = 130
KEPT = {
    "build-index": "what is whole is kept, and the same command goes on; a prefill begins anew",
    "append": "the index is as it was; what is whole is kept, and the same command goes on; a prefill begins anew",
    "eval": "the answers are kept, and the same command goes on from there",
    "generate": "the index is as it was",
    "chat": "the index is as it was",
    "tune": "the index is as it was",
}
"""What a command keeps when it is interrupted; the others keep nothing and change nothing."""


class Interruption:
    """Remembers whether Ctrl-C was pressed: libraries turn KeyboardInterrupt into other errors, or lose it."""

    def __init__(self) -> None:
        self.came = False

    def told(self, command: str) -> str:
        """The line to print: what the interrupted command keeps."""
        resumes = any(one == "--resume" or one.startswith("--resume=") for one in sys.argv)
        return f"interrupted; {KEPT.get('eval' if resumes else command, 'nothing was changed')}"

    def take(self, number: int, frame: FrameType | None) -> None:
        if self.came:  # a second Ctrl-C does not wait for the cleanup
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        self.came = True
        raise KeyboardInterrupt


@contextmanager
def interruptions() -> Iterator[Interruption]:
    """Records Ctrl-C inside the context; afterwards Ctrl-C kills the process. Under nohup SIGINT stays ignored."""
    interruption = Interruption()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield interruption
        return
    hook = sys.unraisablehook

    def again(unraisable: Any) -> None:
        """Raise an interrupt again that came during a finaliser: Python would only print it."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            interruption.came = False
            signal.raise_signal(signal.SIGINT)
        else:
            hook(unraisable)

    sys.unraisablehook = again
    signal.signal(signal.SIGINT, interruption.take)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.unraisablehook = hook
