"""Runs of the real command in forks of a process that has its imports, because the imports take seconds."""

import contextlib
import copy
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HANG = 30.0  # seconds
LIMITS = {"AS": 2 << 30, "FSIZE": 1 << 30, "CORE": 0}
"""Resource limits of a run. AS is in bytes beyond those of the imports."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class Run:
    """How a run ended: exit code (negative: the signal), whether it was killed at its time limit, what it printed."""

    arguments: tuple[str, ...]
    code: int
    late: bool
    seconds: float
    stdout: str
    stderr: str

    def told(self) -> str:
        """Return the message of a run that failed as it should: its last line.

        Fail if another line is an error, too.
        """
        lines = self.stderr.rstrip("\n").split("\n")
        errors = [line for line in lines if "error: " in line.lower()]
        assert lines[-1].startswith("sparsekv: error: "), self
        assert errors == lines[-1:], self
        message = lines[-1].removeprefix("sparsekv: error: ")
        assert message.replace(":", ";").split(";", 1)[-1].strip() not in ("", message), f"no remedy: {self}"
        return message

    def assert_harmless(self) -> None:
        """Fail unless the run was done, or failed in one line, without a traceback, a signal or a hang."""
        assert not self.late, f"hangs: {self}"
        assert self.code >= 0, f"{signal.Signals(-self.code).name}: {self}"
        assert "Traceback" not in self.stderr + self.stdout, self
        assert "\x1b" not in self.stderr, f"an escape sequence: {self}"
        assert self.code in (0, 1, 2), self
        if self.code:
            self.told()

    def __str__(self) -> str:
        return (
            f"sparsekv {' '.join(self.arguments)}\nexit code {self.code} after {self.seconds:.1f} s\n"
            f"{self.stdout[-500:]}{self.stderr[-1500:]}"
        )


class Started:
    """A run that may still be under way."""

    def __init__(self, connection: socket.socket, request: dict[str, Any], outputs: tempfile.TemporaryDirectory[str]):
        self._connection, self._request, self._outputs = connection, request, outputs
        self._lines = connection.makefile()
        self.pid: int = json.loads(self._lines.readline())["pid"]

    def stop(self) -> bool:
        """Suspend the run until it gets SIGCONT; return False if it has ended."""
        state = Path(f"/proc/{self.pid}/stat")
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(self.pid, signal.SIGSTOP)
            while (letter := state.read_text().rsplit(")", 1)[1].split()[0]) not in "TZ":
                time.sleep(0.001)
            return letter == "T"
        return False

    def wait(self) -> Run:
        """Wait for the end of the run, and return its results."""
        with self._connection, self._lines, self._outputs as folder:
            answer = json.loads(self._lines.readline())
            printed = {name: _printed(Path(folder, name)) for name in ("stdout", "stderr")}
        return Run(tuple(self._request["arguments"]), answer["code"], answer["late"], answer["seconds"], **printed)


def _printed(path: Path) -> str:
    """Return an output with its line ends; empty if the run wrote to another file."""
    return path.read_bytes().decode(errors="surrogateescape") if path.exists() else ""


class Zygote:
    """Starts commands as forks of a process that has their imports; ends with this process.

    That process has this process's environment, with a home folder of its own.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zygote-")  # home folder for files that libraries write
        home, self.socket = self._folder.name, f"{self._folder.name}/socket"
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", Path(__file__).with_name("zygote.py"), self.socket],
            env=environment | ONE_THREAD | {"HOME": home, "HF_HOME": f"{home}/hub", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def with_packages(self, folder: Path) -> "Zygote":
        """Return another zygote, whose commands also find the packages in a folder. It ends with this zygote."""
        branch = copy.copy(self)
        branch.socket = f"{self.socket}-{folder.name}"
        with socket.socket(socket.AF_UNIX) as connection, connection.makefile() as lines:
            connection.connect(f"{self.socket}-branches")
            connection.sendall(f"{json.dumps([branch.socket, str(folder)])}\n".encode())
            assert lines.readline() == "ready\n"
        return branch

    def start(
        self,
        *arguments: str | Path,
        folder: Path,
        environment: Mapping[str, str] = {},
        seconds: float = HANG,
        limits: Mapping[str, int] = {},
        unprivileged: bool = False,
        kill_before: int | None = None,
        ignored: Sequence[int] = (),
        program: str | None = None,
        **standard: str | None,
    ) -> Started:
        """Start the command in a folder.

        Args:
            environment: variables that differ from this process's environment.
            limits: values by `RLIMIT_` names; AS is in bytes beyond those of the imports.
            unprivileged: file permissions restrict the command, even if the tests run as root.
            kill_before: n; the command is killed before its n-th operation that changes a file.
            ignored: signals that the run ignores, such as SIGHUP under nohup.
            program: a module below `tests` that is run instead of the command.
            standard: files for `stdin`, `stdout`, `stderr`; None closes one.
        """
        outputs = tempfile.TemporaryDirectory(prefix="outputs-")
        request = {
            "arguments": [str(argument) for argument in arguments],
            "folder": str(folder),
            "environment": dict(environment),
            "seconds": seconds,
            "limits": LIMITS | dict(limits),
            "unprivileged": unprivileged,
            "kill_before": kill_before,
            "ignored": list(ignored),
            "program": program,
            "stdin": "/dev/null",
            "stdout": f"{outputs.name}/stdout",
            "stderr": f"{outputs.name}/stderr",
            **standard,
        }
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.socket)
        connection.sendall(f"{json.dumps(request)}\n".encode())
        return Started(connection, request, outputs)

    def run(self, *arguments: str | Path, **how: Any) -> Run:
        """Run the command to its end, with the arguments of `start`."""
        return self.start(*arguments, **how).wait()


@functools.cache
def zygote() -> Zygote:
    """Return the zygote of all runs of this process."""
    return Zygote()
