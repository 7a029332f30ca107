"""Runs of the real command on an index, to the end or until it is killed."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .command import start
from .forked import Started


@dataclass(frozen=True)
class Command:
    """A command on the index in a folder, which may be run or killed several times."""

    folder: Path
    arguments: tuple[str | Path, ...]

    def _start(self) -> Started:
        return start(*self.arguments, cwd=self.folder.parent)

    def run(self) -> float:
        """Run the command to its end; return the seconds that it took."""
        done = self._start().wait()
        assert done.code == 0, done
        return done.seconds

    def kill_after(self, seconds: float) -> None:
        """Kill the command by SIGKILL after some seconds, unless it has ended by then."""
        started = self._start()
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(started.pid, signal.SIGKILL)
        started.wait()

    def kill_when(self, ready: Callable[[], bool]) -> None:
        """Kill the command by SIGKILL as soon as `ready` returns True; fail if the command ends before."""
        started = self._start()
        while not ready():
            os.kill(started.pid, 0)
            time.sleep(0.02)
        os.kill(started.pid, signal.SIGKILL)
        assert started.wait().code == -signal.SIGKILL
