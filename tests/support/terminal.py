"""Running the real command on a terminal of its own, to see what reaches it."""

import os
import pty
import subprocess
from pathlib import Path

from .command import EXECUTABLE, environment


def on_terminal(*arguments: str | Path, cwd: Path) -> tuple[int, str]:
    """Exit code, and what the command wrote on a terminal that is its standard output; stderr goes elsewhere."""
    ours, theirs = pty.openpty()
    command = [str(EXECUTABLE), *map(str, arguments)]
    process = subprocess.Popen(command, cwd=cwd, env=environment(), stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
    except OSError:  # how Linux ends a terminal
        pass
    os.close(ours)
    return process.wait(), shown.decode().replace("\r\n", "\n")
