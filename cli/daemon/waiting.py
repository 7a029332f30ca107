"""The client, the process that the shell started, while the server runs its command. The client passes signals on,
stops when the command stops, and ends with the command's exit code or signal."""

import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from sparsekv.cli.daemon.likeness import likeness
from sparsekv.cli.daemon.messages import (
    ACCEPTED,
    ENDED,
    GO,
    KILLED,
    MOST_DESCRIPTORS,
    MOST_NUMBER,
    STOPPED,
    TO_ALL,
    is_own_peer,
    send,
)

PATIENCE = 5.0  # seconds after which this process runs the command itself if the server does not answer
OF_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGWINCH, signal.SIGHUP)
"""Signals that a terminal sends to all processes of a command."""
PASSED_ON = (*OF_TERMINAL, signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
READS_TERMINAL = "chat"
"""The command that reads the terminal for as long as it runs."""


def run_by(path: str) -> None:
    """Let the server at `path` run the command, and end as the command ends.

    Returns if the server does not answer or refuses the command. Also returns, without asking the server, if this
    process is in the background or has too many open descriptors.
    """
    if _in_background():
        return
    descriptors = _inherited()
    if len(descriptors) >= MOST_DESCRIPTORS or max(descriptors, default=0) > MOST_NUMBER:
        return
    with socket.socket(socket.AF_UNIX) as connection, _passing_on(connection) as passing:
        if not _accepted(connection, path, descriptors):
            return
        passing.begin()
        _wait(connection, passing)


def _accepted(connection: socket.socket, path: str, descriptors: list[int]) -> bool:
    """Send the command to the server; return whether the server runs it."""
    try:
        connection.settimeout(PATIENCE)
        connection.connect(path)
        if not is_own_peer(connection):
            return False
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
        try:
            send(connection, _request(descriptors), [*descriptors, folder])
        finally:
            os.close(folder)
        if connection.recv(1) != ACCEPTED:
            return False
        connection.sendall(GO)
        connection.settimeout(None)
    except (OSError, ValueError):
        return False
    return True


def _request(descriptors: list[int]) -> dict[str, object]:
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    umask = os.umask(0)
    os.umask(umask)
    return {
        "operation": "run",
        "likeness": likeness(),
        "arguments": sys.argv,
        "environment": dict(os.environ),
        "umask": umask,
        "path": sys.path[:1],
        "descriptors": descriptors,
        "ignored": [int(number) for number in ignored],
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "streams": [_described(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
    }


def _described(stream: object) -> dict[str, object] | None:
    """Return how Python has opened a standard stream; None if it is closed."""
    if stream is None:
        return None
    names = ("encoding", "errors", "line_buffering", "write_through")
    return {name: getattr(stream, name) for name in names}


def _inherited() -> list[int]:
    """Return the inheritable descriptors, which this process got at its start: Python itself opens none."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            if os.get_inheritable(int(name)):
                found.append(int(name))
    return sorted(found)


class _Passing:
    """Passes signals on to the server; stores the signals that come before the command has begun."""

    def __init__(self, connection: socket.socket):
        self._connection, self._begun = connection, False
        self.early: list[int] = []

    def take(self, number: int, frame: FrameType | None) -> None:
        if not self._begun:
            self.early.append(number)
            return
        if number == signal.SIGCONT and READS_TERMINAL in sys.argv and _in_background():
            stop_by(signal.SIGTTIN)  # the kernel's signal to a background process that reads the terminal
            return
        with suppress(OSError):  # the server is gone; `_wait` reports it
            self._connection.sendall(bytes([number | (TO_ALL if number in OF_TERMINAL else 0)]))

    def begin(self) -> None:
        """Pass on the stored signals, and from now on each signal as it comes."""
        self._begun = True
        for number in self.early:
            self.take(number, None)


@contextmanager
def _passing_on(connection: socket.socket) -> Iterator[_Passing]:
    """Handle the signals of PASSED_ON that are not ignored, within the context; then raise stored signals again."""
    passing = _Passing(connection)
    before = {number: signal.getsignal(number) for number in PASSED_ON}
    taken = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in taken:
        signal.signal(number, passing.take)
    try:
        yield passing
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
    for early in passing.early:
        signal.raise_signal(early)


def _in_background() -> bool:
    """Whether this process is in the background of its terminal.

    The kernel stops a process in the background that reads the terminal, but would not stop a fork of the server.
    """
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:
        return False


def _wait(connection: socket.socket, passing: _Passing) -> NoReturn:
    """Wait for the command: suspend this process while it is suspended, and end with its exit code or signal.

    If the connection ends first, print an error and end with exit code 1.
    """
    while True:
        try:
            told = connection.recv(2, socket.MSG_WAITALL)
        except OSError:
            told = b""
        if told[:1] == STOPPED:
            stop_by(told[1])
            passing.take(signal.SIGCONT, None)  # also if `stop_by` returned at once, because the shell is gone
        elif told[:1] == ENDED:
            os._exit(told[1])
        elif told[:1] == KILLED:
            _be_killed(told[1])
        else:
            os.write(2, b"sparsekv: error: the server ended before the command did; run the command again\n")
            os._exit(1)


def stop_by(number: int) -> None:
    """Stop this process by a signal until SIGCONT comes.

    Returns at once if the kernel does not stop this process, because its shell is gone.
    """
    before = signal.getsignal(number)
    if number != signal.SIGSTOP:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    if number != signal.SIGSTOP:
        signal.signal(number, before)


def _be_killed(number: int) -> NoReturn:
    """End this process by the signal that killed the command."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)
