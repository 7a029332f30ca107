"""The server: a process that has imported the commands' modules, and forks for each command. Before a fork it starts no
compute threads.

The client is the process that the shell started for a command. A fork of the server, the watcher, waits for a client's
connection and reads the request. A fork of the watcher, the child, waits for the watcher and then runs the command. The
watcher passes signals on to the child, and reports to the client how the child ended. Watcher and child are forked
before a request comes, so a request does not wait for a fork. The child becomes the command's process: it takes the
client's descriptors, folder, environment, signals and streams.
"""

import ctypes
import fcntl
import gc
import io
import locale
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from sparsekv.cli.daemon.likeness import differing, likeness
from sparsekv.cli.daemon.messages import (
    ACCEPTED,
    ENDED,
    GO,
    KILLED,
    REFUSED,
    REMEDY,
    STOPPED,
    TO_ALL,
    is_own_peer,
    receive,
    refuse_listener,
    refuse_missing_folder,
    refuse_occupied,
    remove_own_socket,
    send,
)
from sparsekv.cli.daemon.preloading import Preloaded, preload
from sparsekv.formats.errors import SparsekvError, UsageError, reason_of

MODES = ("r", "w", "w")
NAMES = ("<stdin>", "<stdout>", "<stderr>")


def become(request: dict[str, Any], received: list[int], by_imports: dict[str, str]) -> None:
    """Give this process, a fork of the server, the state of the client whose command it will run.

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


_TIME = struct.Struct("=d")
_PARENT_DIED = 1  # PR_SET_PDEATHSIG: prctl's option for a signal when the parent process dies
WAITING = 128  # maximum number of connections that wait to be accepted
PATIENCE = 5.0  # seconds within which a request must be complete
PAUSE = 0.1  # seconds until the next fork after a spare watcher was killed


def serve(path: str, idle: float, indices: list[str]) -> None:
    """Serve commands until SIGTERM, or until no command has begun for `idle` seconds.

    Returns only in the process of a command, which must then run `sys.argv`. Ends this process if the model of one of
    the `indices` cannot be used.

    Raises:
        SparsekvError: the socket's path is occupied or cannot be used, another server holds the lock, an index cannot
            be opened, or imported modules have started threads.
    """
    with _only_server(path):
        own, environment, files = likeness(), dict(os.environ), resource.getrlimit(resource.RLIMIT_NOFILE)
        preloaded = preload(indices)
        by_imports = {name: value for name, value in os.environ.items() if environment.get(name) != value}
        _refuse_threads()
        with _listening(path) as listener:
            gc.collect()
            gc.freeze()
            os.write(1, b"ready\n")
            _leave_terminal()
            request, received = _Server(path, listener, preloaded, idle, own).run()
    resource.setrlimit(resource.RLIMIT_NOFILE, files)  # opening an index may have raised the limit
    become(request, received, by_imports)


def _refuse_threads() -> None:
    """Raise SparsekvError if this process has threads that a fork would lose.

    OpenBLAS starts threads when numpy is imported, ends them before each fork, and starts them again when they are
    needed. So a fork is made before the threads are counted.
    """
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    if len(os.listdir("/proc/self/task")) != 1:
        raise SparsekvError(
            "an installed package starts threads when it is imported, so no server can be forked; use the "
            "commands without a server"
        )


@contextmanager
def _only_server(path: str) -> Iterator[None]:
    """Hold the lock file beside a socket's path. The kernel releases the lock when this process ends.

    Raises:
        UsageError: the path is occupied, or cannot be used.
        SparsekvError: another server holds the lock.
    """
    refuse_occupied(path)
    refuse_missing_folder(path)
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UsageError(f"{path}: {reason_of(error)}; {REMEDY}") from None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # forks do not inherit this lock
    except OSError:
        raise SparsekvError(f"another server is starting at {path}; wait for it") from None
    try:
        refuse_listener(path)
        yield
    finally:
        os.close(lock)  # the file is not removed, because another server may have opened it already


@contextmanager
def _listening(path: str) -> Iterator[socket.socket]:
    """Listen at a path; replace the socket of an ended server. Only this user may connect.

    Raises UsageError if another file is at the path, or if the path cannot be used.
    """
    listener, fresh = socket.socket(socket.AF_UNIX), f"{path}.{os.getpid()}"
    umask = os.umask(0o177)
    try:
        remove_own_socket(fresh)
        listener.bind(fresh)
        listener.listen(WAITING)
        _refuse_replacing(path, fresh)
        os.rename(fresh, path)
    except OSError as error:
        raise UsageError(f"{path}: {reason_of(error)}; {REMEDY}") from None
    finally:
        os.umask(umask)
    with listener:
        yield listener


def _refuse_replacing(path: str, fresh: str) -> None:
    """Raise UsageError and remove our new socket if another file has appeared at `path` since it was checked."""
    try:
        refuse_occupied(path)
    except UsageError:
        remove_own_socket(fresh)
        raise


def _leave_terminal() -> None:
    """Leave the current folder and the terminal of the shell that started the server, for / and /dev/null."""
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)


Request = tuple[dict[str, Any], list[int]]


def _appended_file() -> int:
    """Return the descriptor of a new file in memory to which several processes may append at once."""
    descriptor = os.memfd_create("commands")
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptor


@dataclass
class _Server:
    """Keeps one spare watcher: a fork that waits for a client's request, with a child that will run the command.

    When the spare watcher takes a request, the server forks the next one.

    Attributes:
        path: the path of the socket.
        idle: seconds after which the server ends if no command has begun.
        likeness: facts of the server's process. A client with other facts runs its command itself.
        began: Unix time in seconds at which the server began.
        commands: descriptor of a file in memory to which the watcher of each command appends the time at which the
            command begins, in seconds of the monotonic clock (`_TIME`).
        ready: time of the monotonic clock at which the server began to wait for commands.
    """

    path: str
    listener: socket.socket
    preloaded: Preloaded
    idle: float
    likeness: dict[str, Any]
    pid: int = field(default_factory=os.getpid)
    began: float = field(default_factory=time.time)
    commands: int = field(default_factory=_appended_file)
    ready: float = field(default_factory=time.monotonic)

    def run(self) -> Request:
        """Serve until the server ends. Returns only in a fork that must run a command."""
        inode = os.lstat(self.path).st_ino
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # watchers that have ended leave no zombies
        signal.signal(signal.SIGTERM, lambda number, frame: _end(self.path, inode))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            taken, take = os.pipe()
            if os.fork() == 0:
                return _spare(self, take)
            os.close(take)
            if not self._is_taken(taken):
                _end(self.path, inode)
            if not os.read(taken, 1):
                time.sleep(PAUSE)  # the spare has been killed
            os.close(taken)

    def _is_taken(self, taken: int) -> bool:
        """Wait until the spare watcher takes a request or is killed. Returns False if the server must end before."""
        while (left := self.ends() - time.monotonic()) > 0:
            if select.select([taken], [], [], left)[0]:
                return True
        return False

    def count(self) -> int:
        """Return the number of commands that have begun."""
        return os.fstat(self.commands).st_size // _TIME.size

    def ends(self) -> float:
        """Return the time of the monotonic clock at which the server ends if no command begins before."""
        count = self.count()
        begun = os.pread(self.commands, _TIME.size, (count - 1) * _TIME.size) if count else _TIME.pack(self.ready)
        return float(_TIME.unpack(begun)[0]) + self.idle

    def status(self) -> dict[str, Any]:
        """Return the facts about the server that `start --status` shows."""
        return {
            "pid": self.pid,
            "began": self.began,
            "commands": self.count(),
            "ends": self.ends(),
            "memory": _own_memory(self.pid),
            "indices": self.preloaded.described(),
            "changed": self.preloaded.changed(),
            "likeness": self.likeness,
        }


def _end(path: str, inode: int) -> NoReturn:
    """End the server. Remove its socket, unless another server has replaced the socket."""
    with suppress(OSError):
        if os.lstat(path).st_ino == inode:
            remove_own_socket(path)
    os._exit(0)


def _own_memory(pid: int) -> int:
    """Return the proportional set size of a process in bytes: shared pages are divided by the number of processes that
    share them. 0 if the kernel does not report it."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _spare(server: _Server, take: int) -> Request:
    """Wait for a request as the watcher. Returns only in the watcher's child, which must run the request's command."""
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    _end_with_parent(server.pid, signal.SIGTERM)
    own, childs = socket.socketpair()
    child = os.fork()
    if child == 0:
        own.close()
        server.listener.close()
        os.close(take)
        os.close(server.commands)
        return _wait_for_request(childs, os.getppid(), server.preloaded)
    childs.close()
    connection, _ = server.listener.accept()
    _end_with_parent(server.pid, 0)
    server.listener.close()
    os.write(take, b"t")
    os.close(take)
    with suppress(OSError, ValueError, KeyError):
        _watch(server, connection, own, child)
    os._exit(0)


def _wait_for_request(watcher: socket.socket, pid: int, preloaded: Preloaded) -> Request:
    """Wait in a watcher's child, in a new process group, until the watcher passes a request on; return the request.

    Meanwhile the child warms up. The child ends if the watcher ends without a request for a command.

    Args:
        watcher: the connection to the watcher.
        pid: the watcher's process id.
    """
    os.setpgid(0, 0)
    _end_with_parent(pid, signal.SIGKILL)
    with watcher:
        for _ in preloaded.warm_up():
            if select.select([watcher], [], [], 0)[0]:
                break
        try:
            return receive(watcher)
        except (OSError, ValueError):
            os._exit(0)


def _watch(server: _Server, connection: socket.socket, own: socket.socket, child: int) -> None:
    """Answer a request; a command that is accepted runs in the child. Another user's request is not answered."""
    connection.settimeout(PATIENCE)
    if not is_own_peer(connection):
        return
    request, received = receive(connection)
    if request["operation"] == "status":
        send(connection, server.status())
    elif request["operation"] == "stop":
        os.kill(server.pid, signal.SIGTERM)
    elif _accept(server, connection, request):
        os.write(server.commands, _TIME.pack(time.monotonic()))
        send(own, request, received)
        own.close()
        for descriptor in received:
            os.close(descriptor)
        connection.settimeout(None)
        _Watcher(connection, child).run()


def _accept(server: _Server, connection: socket.socket, request: dict[str, Any]) -> bool:
    """Accept or refuse a command; return whether the command was accepted and its client still waits.

    A server ends if a file that it has imported has changed.
    """
    if changed := server.preloaded.changed():
        os.kill(server.pid, signal.SIGTERM)
    if changed or differing(server.likeness, request["likeness"]) is not None:
        connection.sendall(REFUSED)
        return False
    connection.sendall(ACCEPTED)
    return connection.recv(1) == GO


def _end_with_parent(parent: int, number: int) -> None:
    """Let the kernel send signal `number` to this process when its parent process ends; 0: no signal.

    Ends this process if the parent, whose process id is `parent`, has already ended.
    """
    ctypes.CDLL(None).prctl(_PARENT_DIED, number)
    if number and os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)


@dataclass
class _Watcher:
    """Passes the client's signals on to the command, and reports to the client when the command stops or ends.

    The command is killed if the client is gone.
    """

    connection: socket.socket
    child: int

    def run(self) -> None:
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(woken)
        ended, waited_for = self._told(), list[Any]([self.connection, wake])
        while not ended:
            ready: list[Any] = select.select(waited_for, [], [])[0]
            if wake in ready:
                os.read(wake, 4096)
                ended = self._told()
            elif not self._pass_on():
                os.killpg(self.child, signal.SIGKILL)
                os.waitpid(self.child, 0)
                ended = True

    def _pass_on(self) -> bool:
        """Pass received signals on to the command. Returns False if the client is gone."""
        try:
            numbers = self.connection.recv(64)
        except OSError:
            return False
        for number in numbers:
            send_signal = os.killpg if number & TO_ALL else os.kill
            send_signal(self.child, number & ~TO_ALL)
        return bool(numbers)

    def _told(self) -> bool:
        """Report to the client how the child has stopped or ended since the last call.

        Returns whether the child has ended.
        """
        while True:
            child, status = os.waitpid(self.child, os.WNOHANG | os.WUNTRACED)
            if not child:
                return False
            with suppress(OSError):
                self.connection.sendall(_described(status))
            if not os.WIFSTOPPED(status):
                return True


def _described(status: int) -> bytes:
    if os.WIFSTOPPED(status):
        return STOPPED + bytes([os.WSTOPSIG(status)])
    if os.WIFSIGNALED(status):
        return KILLED + bytes([os.WTERMSIG(status)])
    return ENDED + bytes([os.WEXITSTATUS(status)])
