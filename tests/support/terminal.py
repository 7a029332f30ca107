"""Runs of the real command on a terminal of its own, and the text that reaches the terminal."""

import os
import pty
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .command import run_into, start


def on_terminal(*arguments: str | Path, cwd: Path, columns: int = 80) -> tuple[int, str]:
    """Run the command with a terminal as its stdout, without stderr; return the exit code and the terminal's text."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    started = start(*arguments, cwd=cwd, stdout=os.ttyname(theirs), stderr="/dev/null")
    while os.readlink(f"/proc/{started.pid}/fd/1") != os.ttyname(theirs):
        time.sleep(0.001)
    os.close(theirs)
    shown = _shown(ours)
    return started.wait().code, shown


def here_on_terminal(*arguments: str | Path, columns: int = 1000) -> tuple[int, str]:
    """Run the command in this process with a terminal as stdout and stderr; return the exit code and the terminal's
    text."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    with ThreadPoolExecutor(1) as reader, os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        shown = reader.submit(_shown, ours)
        code = run_into(terminal, terminal, *arguments)
        terminal.close()
        return code, shown.result()


def _shown(terminal: int) -> str:
    """Return the text that is written on a terminal until all writers have closed it; close it."""
    shown = b""
    try:
        while data := os.read(terminal, 65536):
            shown += data
    except OSError:  # how Linux ends a terminal
        pass
    os.close(terminal)
    return shown.decode().replace("\r\n", "\n")
