"""Program that `forked.py` starts: it imports the command once, and forks for every run.

Each connection brings one request, a line of JSON. A fork becomes the command, and goes through `run()` to the
interpreter's end. This process then sends how the fork ended. Nothing computes before a fork, so there are no threads
that a fork would lose.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import resource
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from sparsekv.cli.common.commands import COMMANDS
from sparsekv.cli.main import run

STANDARD = ("stdin", "stdout", "stderr")
IMPORTS = (
    "faiss",
    "sparsekv.cli.common.plots",  # without this import, each home folder's first plot would list all fonts
    "sparsekv.indexing.append",
    "sparsekv.indexing.convert",
    "transformers.convert_slow_tokenizer",
    "transformers.models.auto.tokenization_auto",
    transformers.models.llama.modeling_llama.__name__,
)
"""Modules that commands import besides their own, whatever packages are installed. None of them starts a thread."""
LATE = ("cli.answering.output", "cli.app", "cli.building.several")
"""Modules of `sparsekv` that commands import besides their own, and that may look for installed packages."""
COMPILED = ("sparsekv.kernels.attention.cluster_step_numba", "sparsekv.kernels.attention.code_step_numba")
"""Modules that need numba."""
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate")
"""Audit events of file operations that change a file, in addition to `open` for writing."""


@dataclass(frozen=True)
class _Watched:
    """A running command: the connection of its request, its process, and its deadline."""

    connection: socket.socket
    child: int
    started: float
    deadline: float

    def end(self, *, late: bool) -> None:
        """Kill what remains of the run's process group, and send how the run ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
        answer = {"code": code, "seconds": time.monotonic() - self.started, "late": late}
        with self.connection, contextlib.suppress(BrokenPipeError):
            self.connection.sendall(json.dumps(answer).encode())


def _serve(path: str) -> dict[str, Any]:
    """Fork for every request.

    Returns only in the forks, with their request. Ends when this program's standard input ends.
    """
    runs: dict[int, _Watched] = {}  # by the descriptor of each process
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        print("ready", flush=True)
        while True:
            soonest = min((run.deadline for run in runs.values()), default=math.inf)
            wait = None if soonest == math.inf else max(0.0, soonest - time.monotonic())
            ready = select.select([server, sys.stdin, *runs], [], [], wait)[0]
            if sys.stdin in ready:
                for run in runs.values():
                    run.end(late=True)
                os._exit(0)
            for descriptor, run in [*runs.items()]:
                if descriptor in ready or run.deadline <= time.monotonic():
                    os.close(descriptor)
                    runs.pop(descriptor).end(late=descriptor not in ready)
            if server in ready:
                request, run = _start(server.accept()[0])
                if run is None:
                    for descriptor, other in runs.items():
                        os.close(descriptor)
                        other.connection.close()
                    return request
                runs[os.pidfd_open(run.child)] = run


def _branch(path: str) -> str:
    """Fork a process that forks commands: one for this program's own socket, and one more for each request.

    The commands of a further process find the packages in further folders. Returns in these processes, with their
    socket.
    """
    if os.fork() == 0:
        return path
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{path}-branches")
        server.listen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while server in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                with connection.makefile() as lines:
                    branch, folder = json.loads(lines.readline())
                sys.path.insert(0, folder)
                os.dup2(connection.fileno(), 1)
                connection.close()
                return str(branch)
            connection.close()
    os._exit(0)


def _start(connection: socket.socket) -> tuple[dict[str, Any], _Watched | None]:
    """Fork for a connection's request; in the fork, the second result is None."""
    with connection.makefile() as lines:
        request: dict[str, Any] = json.loads(lines.readline())
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        connection.close()
        return request, None
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{json.dumps({'pid': child})}\n".encode())
    return request, _Watched(connection, child, started, started + request["seconds"])


def _become(request: dict[str, Any]) -> None:
    """Set up this process as a shell would have started it: folder, environment, standard files, limits, privileges."""
    os.setsid()
    for number, name in enumerate(STANDARD):
        _redirect(number, name, request[name])
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    for name, value in request["limits"].items():
        limit = value + _mapped() if name == "AS" else value
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    if request["unprivileged"]:
        _drop_privileges()
    sys.argv = [request["program"] or "sparsekv", *request["arguments"]]
    if request["kill_before"] is not None:
        sys.addaudithook(_Countdown(request["kill_before"], request["folder"]))


def _redirect(number: int, name: str, path: str | None) -> None:
    """Open a file as a standard file of this process.

    With None, the standard file is closed, which leaves Python without the object.
    """
    if path is None:
        os.close(number)
        setattr(sys, name, None)
        return
    flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
    descriptor = os.open(path, flags, 0o600)
    os.dup2(descriptor, number)
    os.close(descriptor)


def _drop_privileges() -> None:
    """Drop all capabilities, so that file permissions restrict even root."""
    version, this_process = 0x20080522, 0
    none = struct.pack("6I", *[0] * 6)
    assert ctypes.CDLL(None).capset(struct.pack("Ii", version, this_process), none) == 0


def _mapped() -> int:
    """Return the bytes of address space that this process has already; limits count from there."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


class _Countdown:
    """Kills its process before the n-th operation that changes a file below a folder, or a file with a relative name.

    Before a rename, half of the file is cut off, as if the kill had come while the file was written.
    """

    def __init__(self, operations: int, folder: str):
        self.operations, self.folder = operations, folder

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.operations <= 0 or not self._counts(event, arguments):
            return
        self.operations -= 1
        if self.operations == 0:
            if event == "os.rename":
                _halve(arguments[0], arguments[2])
            os.kill(os.getpid(), signal.SIGKILL)

    def _counts(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open":
            changes = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        else:
            changes = event in CHANGES
        if not changes or not isinstance(arguments[0], str | bytes | os.PathLike):
            return False
        path = os.fsdecode(arguments[0])
        return not path.startswith("/") or path.startswith(self.folder)


def _halve(path: Any, folder: int) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY, dir_fd=None if folder == -1 else folder)
        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)


def _end(code: int) -> None:
    """End the process like the interpreter, but without freeing all imported objects, which takes most of a short
    run."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for output in (sys.stdout, sys.stderr):
        if output is not None:
            output.flush()
    os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):
        for name in COMPILED:
            importlib.import_module(name)
    for name in IMPORTS:
        importlib.import_module(name)
    get_checkpoint_conversion_mapping("")  # compiles patterns of all families, as the first loading of a model would
    own = _branch(sys.argv[1])
    for module in (*LATE, *(f"cli.{command.replace('-', '_')}" for command in COMMANDS)):
        importlib.import_module(f"sparsekv.{module}")
    assert os.listdir("/proc/self/task") == [str(os.getpid())], "a thread would be lost at each fork"
    # At exit torch unregisters its operators one by one, which takes most of the time of a short run.
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    runpy.run_path(str(Path(__file__).with_name("unsynced.py")))["sync_nothing"]()
    gc.freeze()
    _become(_serve(own))
    torch.set_num_threads(1)  # torch renews its thread pool after a fork, and fails if two threads do so
    try:
        if sys.argv[0] == "sparsekv":
            run()
        else:
            sys.path.insert(0, str(Path(__file__).parents[1]))
            runpy.run_module(sys.argv[0], run_name="__main__")
        _end(0)
    except SystemExit as end:
        _end(int(str(end.code)))
    except Exception:
        sys.excepthook(*sys.exc_info())
        _end(1)
