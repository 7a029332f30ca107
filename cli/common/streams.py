"""Standard streams that are closed, full, or of an encoding that not every text has."""

import io
import os
import signal
import sys
from typing import Any

from sparsekv.formats.errors import SparsekvError


class _Stdout(io.FileIO):
    """Standard output whose errors name it, and that may outlive its reader."""

    outlives_reader = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self.outlives_reader and isinstance(error, BrokenPipeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
                return len(data)
            raise OSError(error.errno, error.strerror, "standard output") from None


def prepare_streams() -> None:
    """Make all three usable: text is UTF-8, and bytes of names that are not come out as they were.

    Raises:
        SparsekvError: standard output is closed, so that no result could be shown.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # Or else a file of an index would be opened as this number, and a library's print would go into it.
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # it stays open
    if sys.stdout is None:
        raise SparsekvError("standard output is closed; send it to a file, or to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.flush()
        raw = io.BufferedWriter(_Stdout(sys.stdout.fileno(), "w", closefd=False))
        lines = sys.stdout.line_buffering
        sys.stdout = io.TextIOWrapper(raw, "utf-8", "surrogateescape", line_buffering=lines)


def outlive_reader() -> None:
    """Let a reader that has enough (`| head -1`) be no reason to stop: more is to be done than to be read."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Stdout):
        raw.outlives_reader = True


def flush_streams() -> OSError | None:
    """Write what is buffered; why standard output cannot be written, if so. Nothing is left for the end of Python."""
    failure = None
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            failure = error if stream is sys.stdout else failure
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return failure
