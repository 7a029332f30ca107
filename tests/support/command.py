"""Running the real command: as a process of its own, or in this one, where many short runs would cost too much."""

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
    """What commands are given. Parallel workers whose commands take every core each would only wait for one another."""
    return os.environ | ({"OMP_NUM_THREADS": "1"} if "PYTEST_XDIST_WORKER" in os.environ else {})


def installed(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the installed command in a folder, which imports for seconds; the caller looks at its exit code."""
    command = [str(EXECUTABLE), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)


def start(
    *arguments: str | Path, cwd: Path, seconds: float = 600, ignored: Sequence[int] = (), **standard: str | None
) -> Started:
    """Start the real command, forked from a process that has its imports; it may take what a model needs.

    Args:
        seconds: time after which the command is killed.
        ignored: signals that the command ignores.
    """
    limits = LIMITS | {"AS": 1 << 40, "FSIZE": 1 << 40}
    home = {"HOME": str(Path.home())}
    how = {"environment": home, "seconds": seconds, "limits": limits, "ignored": ignored}
    return zygote().start(*arguments, folder=cwd, **how, **standard)


def sparsekv(*arguments: str | Path, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the real command in a folder; the caller looks at its exit code."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(stdin)
        file.flush()
        done = start(*arguments, cwd=cwd, stdin=file.name).wait()
    return subprocess.CompletedProcess(list(map(str, arguments)), done.code, done.stdout, done.stderr)


def shell(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a bash script that calls `sparsekv`; a failure anywhere in a pipe is the script's.

    Each call is a process of its own with the script's pipes, forked from one that has its imports.
    """
    command = ["bash", "-o", "pipefail", "-c", script]
    path = f"{_forked_command()}:{EXECUTABLE.parent}:{environment()['PATH']}"
    return subprocess.run(
        command, cwd=cwd, env=environment() | {"PATH": path}, capture_output=True, text=True, check=False
    )


@functools.cache
def _forked_command() -> Path:
    """A folder with a `sparsekv` whose runs the zygote forks."""
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
        """The one line of an error; fails when there is more, less, or a traceback. That an index's model is loaded may
        have been said before."""
        said = "which the index names and you have named before"
        lines = [line for line in self.stderr.strip().splitlines() if not line.endswith(said)]
        assert len(lines) == 1, self.stderr
        assert lines[0].startswith("sparsekv: error: "), self.stderr
        assert self.stdout == ""
        return lines[0].removeprefix("sparsekv: error: ")


def run_here(*arguments: str | Path) -> Outcome:
    """Run the command's own entry in this process and in the current folder."""
    stdout, stderr = io.StringIO(), io.StringIO()
    code = run_into(stdout, stderr, *arguments)
    return Outcome(code, stdout.getvalue(), stderr.getvalue())


_parser = functools.cache(typer.main.get_command)
"""The parser of a command's options, made once: making it takes as long as a short command, and it never changes."""


def run_into(stdout: TextIO, stderr: TextIO, *arguments: str | Path) -> int:
    """Run the command's own entry in this process, with other standard files; return its exit code."""
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
    """A call with more options; one that it has already gets the new value, since no option is taken twice."""
    kept = [*command]
    for name in options:
        if name.startswith("--") and name in kept:
            del kept[kept.index(name) : kept.index(name) + 2]
    return (*kept, *options)


def fails(code: int, *arguments: str, says: tuple[str, ...]) -> None:
    """Runs the command here and checks its exit code and that its one line of an error says every part."""
    outcome = run_here(*arguments)
    message = outcome.error()
    assert outcome.code == code, message
    for part in says:
        assert part in message, message
