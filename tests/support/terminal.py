"""Running the real command on a terminal of its own, to see what reaches it."""

import os
import pty
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .command import run_into, start


def on_terminal(*arguments: str | Path, cwd: Path, columns: int = 80) -> tuple[int, str]:
    """Exit code, and what the command wrote on a terminal that is its standard output; stderr goes elsewhere."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    started = start(*arguments, cwd=cwd, stdout=os.ttyname(theirs), stderr="/dev/null")
    while os.readlink(f"/proc/{started.pid}/fd/1") != os.ttyname(theirs):
        time.sleep(0.001)
    os.close(theirs)
    shown = _shown(ours)
    return started.wait().code, shown


def here_on_terminal(*arguments: str | Path, columns: int = 1000) -> tuple[int, str]:
    """Exit code, and what the command wrote in this process on a terminal that is its stdout and stderr."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    with ThreadPoolExecutor(1) as reader, os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        shown = reader.submit(_shown, ours)
        code = run_into(terminal, terminal, *arguments)
        terminal.close()
        return code, shown.result()


def _shown(terminal: int) -> str:
    """Read what is written on a terminal until all of its writers have closed it; close it."""
    shown = b""
    try:
        while data := os.read(terminal, 65536):
            shown += data
    except OSError:  # how Linux ends a terminal
        pass
    os.close(terminal)
    return shown.decode().replace("\r\n", "\n")
