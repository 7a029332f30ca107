"""Running the real command on an index, to its end or until it is killed."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .command import ENVIRONMENT, EXECUTABLE


@dataclass(frozen=True)
class Command:
    """One command on the index in a folder, to be run, or killed after a while, as often as it takes."""

    folder: Path
    arguments: tuple[str | Path, ...]

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([EXECUTABLE, *self.arguments], env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True)

    def run(self) -> float:
        """Seconds that a whole run took."""
        started = time.monotonic()
        process = self._start()
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        return time.monotonic() - started

    def kill_after(self, seconds: float) -> None:
        """`kill -9`, unless it has ended by then."""
        process = self._start()
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        process.communicate()

    def kill_when(self, ready: Callable[[], bool]) -> None:
        """`kill -9` as soon as something is so; fails where the command ends before."""
        process = self._start()
        while not ready():
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
