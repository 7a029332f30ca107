"""The end of a command that failed: one line on stderr, with its exit code."""

import sys
import traceback
from contextlib import suppress
from typing import NoReturn

from sparsekv.cli.common.failures import causes, describe
from sparsekv.cli.common.printable import printable
from sparsekv.cli.common.streams import flush_streams
from sparsekv.cli.common.wrong_usage import described_usage, known_options


def fail(error: BaseException, command: str, *, debug: bool) -> NoReturn:
    """Print an error as one line on stderr and exit; with `debug` its traceback is printed first."""
    if debug:
        with suppress(OSError):
            print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    for one in causes(error):
        one.__traceback__ = None  # frees what its frames hold: memory may have run out
    usage = getattr(error, "format_message", None)  # typer's usage errors, by attribute: typer may not be loaded
    message = (
        describe(error, command)
        if usage is None
        else described_usage(usage(), command, sys.argv[1:], options=known_options(error))
    )
    notes = getattr(error, "__notes__", [])
    message += f" ({'; '.join(notes)})" if notes else ""
    end(int(getattr(error, "exit_code", 1)), f"error: {message}")


def end(code: int, message: str = "") -> NoReturn:
    """Print a message to stderr and exit; a message that cannot be written (a full disk) is dropped."""
    if message:
        with suppress(OSError):
            print(f"sparsekv: {' '.join(printable(message).split())}", file=sys.stderr)
    flush_streams()
    sys.exit(code)
