"""Dialogues with the real command on a terminal of its own, through `pexpect`."""

import fcntl
import os
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pexpect import EOF
from pexpect.fdpexpect import fdspawn

from .forked import LIMITS, zygote

PATIENCE = 30
"""Seconds to wait for an expected output."""


class Dialogue(fdspawn):
    """A running command whose standard files are its controlling terminal.

    The command is forked from a process that has its imports. Its files for later runs are in `cwd/cache`.

    Args:
        stdout: a file that takes standard output in place of the terminal.
    """

    def __init__(self, *arguments: str | Path, cwd: Path, stdout: Path | None = None):
        ours, theirs = os.openpty()
        name = os.ttyname(theirs)
        files = {"stdin": name, "stdout": str(stdout or name), "stderr": name}
        environment = {"TERM": "xterm", "SPARSEKV_CACHE": str(cwd / "cache")}
        limits = LIMITS | {"AS": 1 << 40}
        self.started = zygote().start(
            *arguments, folder=cwd, environment=environment, seconds=120, limits=limits, **files
        )
        while os.readlink(f"/proc/{self.started.pid}/fd/2") != name:
            time.sleep(0.001)
        os.close(theirs)
        super().__init__(ours, timeout=PATIENCE, encoding="utf-8", codec_errors="replace")

    def resize(self, lines: int, columns: int) -> None:
        """Change the size of the terminal's window; the terminal tells the command."""
        fcntl.ioctl(self.fileno(), termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))

    def press(self, letter: str) -> None:
        """Press Ctrl and a letter."""
        self.send(chr(ord(letter.upper()) - 64))

    def until_it_waits(self) -> None:
        """Wait until the command sleeps. Between a prompt and the wait for input, readline loses a Ctrl-C."""
        state = Path(f"/proc/{self.started.pid}/stat")
        seen = ""
        while not seen.endswith("SSS"):
            time.sleep(0.005)
            seen += state.read_text().rpartition(")")[2].split()[0]

    def paste(self, text: str) -> None:
        """Paste a text as a terminal with bracketed paste sends it."""
        self.send(f"\x1b[200~{text.replace(chr(10), chr(13))}\x1b[201~")

    def until(self, pattern: str) -> str:
        """Wait for a pattern; return the text before it, with line ends as in a file."""
        self.expect(pattern)
        return str(self.before).replace("\r\n", "\n")


@contextmanager
def dialogue(*arguments: str | Path, cwd: Path, stdout: Path | None = None) -> Iterator[Dialogue]:
    """Start a command for a dialogue. It must end within the context, with exit code 0."""
    one = Dialogue(*arguments, cwd=cwd, stdout=stdout)
    try:
        yield one
        one.expect_exact(EOF)
        assert one.started.wait().code == 0
    finally:
        one.close()
