"""Make the standard streams usable when they are closed, full, or in an encoding other than UTF-8."""

import io
import os
import signal
import sys
from typing import Any

from sparsekv.formats.errors import SparsekvError


class _Stdout(io.FileIO):
    """Standard output whose errors name it, and that may ignore a closed pipe."""

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
    """Make stdin, stdout and stderr usable: text is UTF-8, and file names that are not are written byte for byte.

    Raises:
        SparsekvError: standard output is closed, so that no result could be shown.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # Otherwise a file of an index could get this descriptor, and a library's print would go into it.
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
    """Keep running when the reader of stdout closes the pipe (`| head -1`), for commands that still have to write."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Stdout):
        raw.outlives_reader = True


def flush_streams() -> OSError | None:
    """Flush stdout and stderr, and return the error of stdout if it cannot be written.

    A stream that fails goes to /dev/null from then on, so that Python reports nothing more at exit.
    """
    failure = None
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            failure = error if stream is sys.stdout else failure
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return failure
