"""The command line's entry: every failure becomes one line and an exit code. What is heavy is imported inside of it."""

import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from sparsekv.cli.failures import describe
from sparsekv.cli.interruption import INTERRUPTED, interruptions
from sparsekv.cli.printable import printable
from sparsekv.cli.streams import flush_streams, prepare_streams


def run() -> None:
    """Run the command line on `sys.argv`: exit code 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    # A reader that has enough (`| head -1`) ends a writer in silence, as with any other program.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    debug = "--debug" in sys.argv
    error: BaseException | None = None
    code = 0
    with interruptions() as interruption:
        try:
            prepare_streams()
            with _quiet_libraries(debug=debug):
                code = _call()
        except BaseException as caught:
            error = caught
            if debug and not isinstance(caught, SystemExit):
                print(printable(traceback.format_exc()), end="", file=sys.stderr)
    unwritten = flush_streams()
    if interruption.came and (error is not None or code):
        _end(INTERRUPTED, interruption.told(_command()))
    error = error or unwritten
    if isinstance(error, SystemExit):
        raise error
    if error is None:
        _end(code, "")
    usage = getattr(error, "format_message", None)  # of typer, which may not even be loaded
    message = describe(error, _command()) if usage is None else usage()
    _end(int(getattr(error, "exit_code", 1)), f"error: {message}")


def _end(code: int, message: str) -> NoReturn:
    if message:
        with suppress(OSError):
            print(f"sparsekv: {' '.join(printable(message).split())}", file=sys.stderr)
        flush_streams()
    sys.exit(code)


def _call() -> int:
    from sparsekv.cli.app import app

    code = app(standalone_mode=False, prog_name="sparsekv")
    return code if isinstance(code, int) else 0


def _command() -> str:
    return next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")


@contextmanager
def _quiet_libraries(*, debug: bool) -> Iterator[None]:
    """Keeps warnings of libraries, which a person can do nothing about, off the screen."""
    if debug:
        yield
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    shown, level = warnings.showwarning, logging.root.manager.disable
    warnings.showwarning = lambda *told, **more: None
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        warnings.showwarning = shown
        logging.disable(level)
