"""Set up a fork of the server as a command's process: descriptors, folder, environment, signals and streams.

The client is the process that the shell started for the command.
"""

import fcntl
import io
import locale
import os
import signal
import sys
from typing import Any

MODES = ("r", "w", "w")
NAMES = ("<stdin>", "<stdout>", "<stderr>")


def become(request: dict[str, Any], received: list[int], by_imports: dict[str, str]) -> None:
    """Give this process the state of the client.

    Args:
        request: the client's message: arguments, environment, streams and signals.
        received: descriptors of the client's open files, then the descriptor of the client's current folder.
        by_imports: environment variables that libraries set when they are imported.
    """
    os.fchdir(received[-1])
    os.close(received[-1])
    _place(received[:-1], request["descriptors"])
    os.environ.clear()
    os.environ.update(request["environment"] | by_imports)
    os.umask(request["umask"])
    sys.argv, sys.path[: len(request["path"])] = request["arguments"], request["path"]
    locale.setlocale(locale.LC_CTYPE, "")
    opened = [_opened(number, described) for number, described in enumerate(request["streams"])]
    sys.stdin, sys.stdout, sys.stderr = opened
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = opened  # type: ignore[misc]
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        _handle(number, ignored=number in request["ignored"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _place(received: list[int], numbers: list[int]) -> None:
    """Give descriptors their numbers in the client; close the standard streams that the client has closed."""
    above = max([2, *numbers, *received]) + 1
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, above) for one in received]
    for one in {*received, 0, 1, 2}:
        os.close(one)
    for one, number in zip(moved, numbers, strict=True):
        os.dup2(one, number, inheritable=True)
        os.close(one)


def _opened(number: int, described: dict[str, Any] | None) -> Any:
    """Open a standard stream as Python opens it when an interpreter starts; None if the client has closed it.

    Args:
        number: the stream's descriptor: 0, 1 or 2.
        described: the encoding and buffering of the client's stream; None if the client has closed it.
    """
    if described is None:
        return None
    mode = MODES[number]
    raw = io.FileIO(number, mode, closefd=False)
    raw.name = NAMES[number]
    buffered: Any = raw
    if mode == "r":
        buffered = io.BufferedReader(raw)
    elif not described["write_through"]:
        buffered = io.BufferedWriter(raw)
    stream: Any = io.TextIOWrapper(buffered, newline="\n", **described)
    stream.mode = mode
    return stream


def _handle(number: int, *, ignored: bool) -> None:
    """Set the handler that a signal has when a Python program starts. `ignored`: the shell has ignored the signal."""
    if ignored:
        handler: Any = signal.SIG_IGN
    else:
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    try:
        signal.signal(number, handler)
    except (OSError, ValueError):  # a signal that the C library uses itself
        return
