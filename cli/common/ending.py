"""The end of a command that failed: one line on stderr, with its exit code."""

import sys
import traceback
from contextlib import suppress
from typing import NoReturn

from sparsekv.cli.common.failures import causes, describe
from sparsekv.cli.common.printable import printable
from sparsekv.cli.common.streams import flush_streams


def fail(error: BaseException, command: str, *, debug: bool) -> NoReturn:
    """Tell of an error and exit; with `debug` its traceback comes first."""
    if debug:
        with suppress(OSError):
            print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    for one in causes(error):
        one.__traceback__ = None  # what its frames hold may be all the memory there is
    usage = getattr(error, "format_message", None)  # of typer, which may not even be loaded
    message = describe(error, command) if usage is None else usage()
    end(int(getattr(error, "exit_code", 1)), f"error: {message}")


def end(code: int, message: str = "") -> NoReturn:
    """Exit; a message that cannot be told (a full disk below the log) is not."""
    if message:
        with suppress(OSError):
            print(f"sparsekv: {' '.join(printable(message).split())}", file=sys.stderr)
    flush_streams()
    sys.exit(code)
