"""Running the real command on a terminal of its own, to see what reaches it."""

import os
import pty
import termios
import time
from pathlib import Path

from .command import start


def on_terminal(*arguments: str | Path, cwd: Path, columns: int = 80) -> tuple[int, str]:
    """Exit code, and what the command wrote on a terminal that is its standard output; stderr goes elsewhere."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    started = start(*arguments, cwd=cwd, stdout=os.ttyname(theirs), stderr="/dev/null")
    while os.readlink(f"/proc/{started.pid}/fd/1") != os.ttyname(theirs):
        time.sleep(0.001)
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
    except OSError:  # how Linux ends a terminal
        pass
    os.close(ours)
    return started.wait().code, shown.decode().replace("\r\n", "\n")
