"""Reads what a person types or pastes at a terminal, with line editing, history and completion by readline.

Pasted text is one entry, however many lines it has, where the terminal marks it (bracketed paste, which all common ones
have). `!multi` begins an entry of several lines that `!end` ends, as in `llm chat`.
"""

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType

from sparsekv.cli.chatting.history import History
from sparsekv.formats.errors import UsageError

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
        """What stood in the line when Ctrl-C was pressed."""
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
