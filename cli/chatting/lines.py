"""Read the input lines of a chat at a terminal. readline provides editing, completion and history."""

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

MOST_ENTRIES = 1000
"""Maximum number of history entries that are offered: the last ones. A file with more than twice as many lines is cut
down to these entries."""


class History:
    """The history file of a chat. An entry is one line of JSON, even if its text has several lines. Only the user may
    read the file.

    Nothing is raised: an unreadable file counts as empty, and an entry that cannot be written is dropped.
    """

    def __init__(self, file: Path | None = None):
        self.file = cache_root() / "chat-history.jsonl" if file is None else file

    def entries(self) -> list[str]:
        """Return the last entries, oldest first, and cut a file that is too long down to them (`MOST_ENTRIES`)."""
        lines = read_small(self.file).splitlines()
        found = [entry for line in lines if isinstance(entry := _parsed(line), str)][-MOST_ENTRIES:]
        if len(lines) > 2 * MOST_ENTRIES:
            self._write(found, os.O_TRUNC)
        return found

    def add(self, entry: str) -> None:
        """Append an entry to the file."""
        self._write([entry], os.O_APPEND)

    def _write(self, entries: list[str], how: int) -> None:
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            # O_NONBLOCK: if the file is a pipe, do not wait for its reader.
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
"""The first and last line of a block of lines. A word after `!multi` must also follow `!end`, so that the block may
contain a plain `!end`."""


class Lines:
    """Reads entries from a terminal, one after another.

    Args:
        complete: returns the possible completions of a line, for the tab key.
    """

    def __init__(self, history: History, complete: Callable[[str], Sequence[str]]):
        self.history, self.complete = history, complete
        # If stdout is no terminal (`| tee`), Python would write the prompt to stdout, among the answers.
        self.readline = _readline() if sys.stdout.isatty() else None
        if self.readline is not None:
            self._set_up(self.readline)

    def read(self) -> str:
        """Return the next entry without white space at its end.

        Raises:
            EOFError: Ctrl-D was pressed, or the terminal is gone.
            KeyboardInterrupt: Ctrl-C was pressed.
            UsageError: the entry is not text in UTF-8.
        """
        entry = self._line(PROMPT)
        if (begun := BLOCK.fullmatch(entry)) is not None:
            entry = self._until(f"{END}{begun[1]}")
        if entry.strip():
            self._remember(entry)
        return entry

    def typed(self) -> str:
        """Return the text of the line when Ctrl-C was pressed; empty without readline."""
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
            raise UsageError("the line is not text in UTF-8; type or paste it again") from None
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
            with suppress(ValueError):  # an entry with a zero byte
                readline.add_history(entry)

    def _completion(self, text: str, number: int) -> str | None:
        """Return the completion with index `number`, because readline requests them one by one. None after the last."""
        found = self.complete(text)
        return found[number] if number < len(found) else None


def _readline() -> ModuleType | None:
    """Return the readline module. None if Python was built without it; then only the terminal edits lines."""
    try:
        import readline
    except ImportError:
        return None
    return readline


def _plain(prompt: str) -> str:
    """Read a line of standard input. The prompt goes to stderr. Raises EOFError at the end of the input."""
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
