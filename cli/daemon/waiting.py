"""The process of a command that the server runs: it passes signals on, stops when the command stops, and ends as the
command ends."""

import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from sparsekv.cli.daemon.address import is_own_peer
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
    send,
)

PATIENCE = 5.0  # seconds until a server that does not answer is left alone
OF_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGWINCH, signal.SIGHUP)
"""Signals that a terminal sends to all processes of a command."""
PASSED_ON = (*OF_TERMINAL, signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
READS_TERMINAL = "chat"
"""The command that reads the terminal for as long as it runs."""


def run_by(path: str) -> None:
    """Run the command by the server at `path`. Returns if the server does not answer, or may not run this command."""
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
    """Return the descriptors that this process got when it was started. Python's own are closed in a new program."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor
            if os.get_inheritable(int(name)):
                found.append(int(name))
    return sorted(found)


class _Passing:
    """Passes signals on to the server; keeps those that come before the command has begun."""

    def __init__(self, connection: socket.socket):
        self._connection, self._begun = connection, False
        self.early: list[int] = []

    def take(self, number: int, frame: FrameType | None) -> None:
        if not self._begun:
            self.early.append(number)
            return
        if number == signal.SIGCONT and READS_TERMINAL in sys.argv and _in_background():
            stop_by(signal.SIGTTIN)  # which the kernel does when a process in the background reads the terminal
            return
        with suppress(OSError):  # the server is gone; `_wait` reports it
            self._connection.sendall(bytes([number | (TO_ALL if number in OF_TERMINAL else 0)]))

    def begin(self) -> None:
        """Pass on the signals that came early, and all from now on."""
        self._begun = True
        for number in self.early:
            self.take(number, None)


@contextmanager
def _passing_on(connection: socket.socket) -> Iterator[_Passing]:
    """Take signals within the context, but for those that are ignored. Those that came are raised after it."""
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
    """Whether this process may not read the terminal. The kernel would stop it, but not a fork of the server."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:
        return False


def _wait(connection: socket.socket, passing: _Passing) -> NoReturn:
    """End as the command ends; stop whenever it stops."""
    while True:
        try:
            told = connection.recv(2, socket.MSG_WAITALL)
        except OSError:
            told = b""
        if told[:1] == STOPPED:
            stop_by(told[1])
            passing.take(signal.SIGCONT, None)  # also if the kernel has not stopped a process that nobody could resume
        elif told[:1] == ENDED:
            os._exit(told[1])
        elif told[:1] == KILLED:
            _be_killed(told[1])
        else:
            os.write(2, b"sparsekv: error: the server ended before the command did; run the command again\n")
            os._exit(1)


def stop_by(number: int) -> None:
    """Stop this process by a signal until SIGCONT comes.

    The kernel does not stop a process whose shell is gone.
    """
    before = signal.getsignal(number)
    if number != signal.SIGSTOP:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    if number != signal.SIGSTOP:
        signal.signal(number, before)


def _be_killed(number: int) -> NoReturn:
    """End by the signal that ended the command."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)
