"""An interactive shell on a terminal of its own, for tests of completion by Tab."""

import os
import pty
import select
import shutil
import time
from pathlib import Path
from types import TracebackType

from .command import EXECUTABLE, environment

SHELLS = tuple(name for name in ("bash", "zsh", "fish") if shutil.which(name))
"""Shells with a completion script that are installed on this machine; bash always is."""
TYPED = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
SET_UP = {
    "bash": "bind 'set enable-bracketed-paste off'; eval \"$(sparsekv completion bash)\"",
    "zsh": 'autoload -U compinit && compinit -u -D; eval "$(sparsekv completion zsh)"',
}
CLEAR_LINE = "\x15"
_PATIENCE = 120.0
"""Seconds to wait for an expected text before the test fails."""


def shell_environment() -> dict[str, str]:
    """Return the environment, with the installed command first on its path, and with a prompt that is easy to find."""
    path = f"{EXECUTABLE.parent}:{os.environ['PATH']}"
    return environment() | {"PATH": path, "TERM": "dumb", "PS1": "READY> ", "COLUMNS": "200", "LINES": "50"}


class TypingShell:
    """An interactive bash or zsh in a folder, with the shell's completion script; a context manager."""

    def __init__(self, name: str, folder: Path):
        self.shown = ""
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(TYPED[name][0], TYPED[name], shell_environment())
        self.wait_for("READY> ")
        self.enter(f"{SET_UP[name]}; echo SET''UP\n")
        self.wait_for("SETUP")
        self.wait_for("READY> ")

    def enter(self, text: str) -> None:
        """Type a text, and forget the text shown before."""
        self.shown = ""
        os.write(self.terminal, text.encode())

    def wait_for(self, text: str) -> str:
        """Return everything that is shown until a text appears; fail if it does not appear."""
        end = time.monotonic() + _PATIENCE
        while text not in self.shown:
            ready, _, _ = select.select([self.terminal], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{text!r} was not shown, but {self.shown!r}"
            self.shown += os.read(self.terminal, 65536).decode(errors="replace")
        return self.shown

    def __enter__(self) -> "TypingShell":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self.terminal)
        os.waitpid(self.pid, 0)
