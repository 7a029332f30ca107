"""Runs of the real command: in processes of their own or, if many short runs would take too long, in this process."""

import atexit
import functools
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO
from unittest import mock

import typer

from sparsekv.cli.main import run

from .forked import LIMITS, Started, zygote

EXECUTABLE = Path(sys.executable).with_name("sparsekv")


def environment() -> dict[str, str]:
    """Return the environment of commands.

    Under parallel tests each command has one thread, so that commands do not compete.
    """
    return os.environ | ({"OMP_NUM_THREADS": "1"} if "PYTEST_XDIST_WORKER" in os.environ else {})


def installed(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the installed command in a folder; its imports take seconds. The caller checks the exit code."""
    command = [str(EXECUTABLE), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)


def start(
    *arguments: str | Path, cwd: Path, seconds: float = 600, ignored: Sequence[int] = (), **standard: str | None
) -> Started:
    """Start the real command, forked from a process that has its imports, with limits that allow for a model.

    Args:
        seconds: time after which the command is killed.
        ignored: signals that the command ignores.
    """
    limits = LIMITS | {"AS": 1 << 40, "FSIZE": 1 << 40}
    home = {"HOME": str(Path.home())}
    how = {"environment": home, "seconds": seconds, "limits": limits, "ignored": ignored}
    return zygote().start(*arguments, folder=cwd, **how, **standard)


def sparsekv(*arguments: str | Path, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the real command in a folder; the caller checks its exit code."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(stdin)
        file.flush()
        done = start(*arguments, cwd=cwd, stdin=file.name).wait()
    return subprocess.CompletedProcess(list(map(str, arguments)), done.code, done.stdout, done.stderr)


def shell(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a bash script that calls `sparsekv`; the script fails if any command of a pipe fails.

    Each call of `sparsekv` is a process of its own with the script's pipes, forked from a process that has the imports.
    """
    command = ["bash", "-o", "pipefail", "-c", script]
    path = f"{_forked_command()}:{EXECUTABLE.parent}:{environment()['PATH']}"
    return subprocess.run(
        command, cwd=cwd, env=environment() | {"PATH": path}, capture_output=True, text=True, check=False
    )


@functools.cache
def _forked_command() -> Path:
    """Return a folder with a program `sparsekv`, whose runs the zygote forks.

    The zygote is a process that has the imports.
    """
    folder = Path(tempfile.mkdtemp(prefix="bin-"))
    atexit.register(shutil.rmtree, folder)
    client = Path(__file__).with_name("shell_client.py")
    script = folder / "sparsekv"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {client} {zygote().socket} "$@"\n')
    script.chmod(0o755)
    return folder


@dataclass(frozen=True)
class Outcome:
    """Exit code and both outputs of a run."""

    code: int
    stdout: str
    stderr: str

    def error(self) -> str:
        """Return the message of a failed run; fail unless there is exactly one error line, and no output.

        A line that tells which model the index names may come before the error line.
        """
        said = "which the index names and you have named before"
        lines = [line for line in self.stderr.strip().splitlines() if not line.endswith(said)]
        assert len(lines) == 1, self.stderr
        assert lines[0].startswith("sparsekv: error: "), self.stderr
        assert self.stdout == ""
        return lines[0].removeprefix("sparsekv: error: ")


def run_here(*arguments: str | Path) -> Outcome:
    """Run the command in this process, in the current folder."""
    stdout, stderr = io.StringIO(), io.StringIO()
    code = run_into(stdout, stderr, *arguments)
    return Outcome(code, stdout.getvalue(), stderr.getvalue())


_parser = functools.cache(typer.main.get_command)
"""The parser of a command's options. Making it takes as long as a short command, and it never changes."""


def run_into(stdout: TextIO, stderr: TextIO, *arguments: str | Path) -> int:
    """Run the command in this process, with other standard files; return its exit code."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGINT)}
    code: object = None
    try:
        argv = mock.patch.object(sys, "argv", ["sparsekv", *map(str, arguments)])
        parser = mock.patch.object(typer.main, "get_command", _parser)
        with argv, parser, redirect_stdout(stdout), redirect_stderr(stderr):
            run()
    except SystemExit as end:
        code = end.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert isinstance(code, int)
    return code


def with_options(command: Sequence[str], *options: str) -> tuple[str, ...]:
    """Return a command with further options. An option that the command already has gets the new value."""
    kept = [*command]
    for name in options:
        if name.startswith("--") and name in kept:
            del kept[kept.index(name) : kept.index(name) + 2]
    return (*kept, *options)


def fails(code: int, *arguments: str, says: tuple[str, ...]) -> None:
    """Run the command in this process; check its exit code, and that its error line has every text in `says`."""
    outcome = run_here(*arguments)
    message = outcome.error()
    assert outcome.code == code, message
    for part in says:
        assert part in message, message
