"""Input lines of a chat at a terminal: editing, completion and history by readline."""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from sparsekv.formats.errors import UsageError
from sparsekv.formats.user.cache import cache_root, read_small

MOST = 1000
"""Entries that are offered; a file of twice as many is cut down to them."""


class History:
    """A file with a line of JSON for each entry, so that one of several lines stays one; for the user's eyes alone.

    A file that cannot be read is an empty one, and what cannot be written is left out: nothing is raised.
    """

    def __init__(self, file: Path | None = None):
        self.file = cache_root() / "chat-history.jsonl" if file is None else file

    def entries(self) -> list[str]:
        """The last entries, oldest first."""
        lines = read_small(self.file).splitlines()
        found = [entry for line in lines if isinstance(entry := _parsed(line), str)][-MOST:]
        if len(lines) > 2 * MOST:
            self._write(found, os.O_TRUNC)
        return found

    def add(self, entry: str) -> None:
        """Write one more entry to the end of the file."""
        self._write([entry], os.O_APPEND)

    def _write(self, entries: list[str], how: int) -> None:
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            # Never waits for the reader of a pipe that lies there.
            descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | how, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.writelines(f"{json.dumps(entry)}\n" for entry in entries)


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


PROMPT, MORE = "> ", "... "
BLOCK, END = re.compile(r"!multi((?: \S+)?)"), "!end"
"""The first and last line of a block; what follows `!multi` follows `!end` too, for text with an `!end` of its own."""


class Lines:
    """Entries of a terminal, one after another.

    Args:
        complete: gives what a line could go on to be, for the tab key.
    """

    def __init__(self, history: History, complete: Callable[[str], Sequence[str]]):
        self.history, self.complete = history, complete
        # Without a terminal to write to (`| tee`) Python would send the prompt with the answers.
        self.readline = _readline() if sys.stdout.isatty() else None
        if self.readline is not None:
            self._set_up(self.readline)

    def read(self) -> str:
        """The next entry, without white space at its end.

        Raises:
            EOFError: Ctrl-D, or the terminal is gone.
            KeyboardInterrupt: Ctrl-C.
            UsageError: it is not text in UTF-8.
        """
        entry = self._line(PROMPT)
        if (begun := BLOCK.fullmatch(entry)) is not None:
            entry = self._until(f"{END}{begun[1]}")
        if entry.strip():
            self._remember(entry)
        return entry

    def typed(self) -> str:
        """The text of the line when Ctrl-C was pressed."""
        return "" if self.readline is None else self.readline.get_line_buffer()

    def _until(self, end: str) -> str:
        lines = []
        while (line := self._line(MORE)) != end:
            lines.append(line)
        return "\n".join(lines).rstrip()

    def _line(self, prompt: str) -> str:
        try:
            line = (input(prompt) if self.readline is not None else _plain(prompt)).rstrip()
            line.encode()
        except UnicodeError:
            raise UsageError("that is not text in UTF-8; type or paste it again") from None
        return line

    def _remember(self, entry: str) -> None:
        self.history.add(entry)
        if self.readline is not None:
            self.readline.add_history(entry)

    def _set_up(self, readline: ModuleType) -> None:
        readline.set_auto_history(False)
        readline.parse_and_bind("set enable-bracketed-paste on")
        readline.parse_and_bind("tab: complete")
        readline.set_completer_delims("")
        readline.set_completer(self._completion)
        for entry in self.history.entries():
            with suppress(ValueError):  # a zero byte
                readline.add_history(entry)

    def _completion(self, text: str, number: int) -> str | None:
        """The n-th way to go on, as readline asks for them one by one."""
        found = self.complete(text)
        return found[number] if number < len(found) else None


def _readline() -> ModuleType | None:
    """None where Python was built without it: then lines are edited by the terminal alone."""
    try:
        import readline
    except ImportError:
        return None
    return readline


def _plain(prompt: str) -> str:
    """A line of standard input; the prompt goes to stderr."""
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
