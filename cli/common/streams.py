"""Standard streams that work even if they are closed, full or not UTF-8. Also the escaping of untrusted text for
terminals."""

import io
import json
import math
import os
import re
import signal
import sys
from typing import Any

from sparsekv.formats.errors import SparsekvError

_SURROGATES = "\ud800-\udfff"
_BIDI = "\u202a-\u202e\u2066-\u2069"
_STEERING = re.compile(rf"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f{_BIDI}{_SURROGATES}]")
_RAW_IN_JSON = re.compile(rf"[\x7f-\x9f\u2028\u2029{_BIDI}{_SURROGATES}]")
_BYTES = range(0xDC80, 0xDD00)
"""Surrogates by which Python represents bytes of a file name that are not UTF-8."""


def printable(text: str) -> str:
    """Return the text with control characters, bidi overrides and undecodable bytes escaped, as in `\\x1b` or
    `\\u202e`.

    Line ends and tabs stay.
    """
    return _STEERING.sub(lambda found: _escaped(ord(found[0])), text)


def json_text(value: Any) -> str:
    """Return JSON on one line. Non-ASCII letters are kept; control characters and line ends are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return _RAW_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def finite_numbers(value: Any) -> Any:
    """Return the value with None instead of numbers that are not finite, which JSON cannot represent."""
    if isinstance(value, dict):
        return {name: finite_numbers(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite_numbers(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _escaped(code: int) -> str:
    code = code - 0xDC00 if code in _BYTES else code
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class _Stdout(io.FileIO):
    """Standard output. Errors name the file `standard output`. With `outlives_reader`, a closed pipe is ignored."""

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
    """Make stdin, stdout and stderr usable. A stream that is closed is opened on /dev/null.

    Text is written to stdout in UTF-8, and file names that are not UTF-8 are written byte for byte.

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
        raise SparsekvError("standard output is closed; redirect it to a file or to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.flush()
        raw = io.BufferedWriter(_Stdout(sys.stdout.fileno(), "w", closefd=False))
        lines = sys.stdout.line_buffering
        sys.stdout = io.TextIOWrapper(raw, "utf-8", "surrogateescape", line_buffering=lines)


def outlive_reader() -> None:
    """Keep running when the reader of stdout closes the pipe (`| head -1`), to write files after that."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Stdout):
        raw.outlives_reader = True


def flush_streams() -> OSError | None:
    """Flush stdout and stderr. Return the error of stdout if it cannot be written, and None otherwise.

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
