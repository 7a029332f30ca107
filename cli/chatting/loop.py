"""Run a chat: a loop over questions and commands at a terminal, or over questions from a pipe.

At a terminal, readline provides editing, completion and history.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import ModuleType

from sparsekv.cli.chatting.session import COMMANDS, Chat, as_question, completions, is_command, run_command
from sparsekv.cli.common.console import note, shortened
from sparsekv.cli.common.failures import describe
from sparsekv.cli.common.questions import MOST
from sparsekv.formats.documents.document import UTF_8, marked_encoding, wait_for_stdin
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.user.cache import cache_root, read_small

MOST_ENTRIES = 1000
"""Number of the last history entries that are offered. A file with more than twice as many lines is cut down to these
entries."""


class History:
    """The history file of a chat. An entry is one line of JSON, even if its text has several lines. Only the user may
    read the file.

    Nothing is raised: an unreadable file counts as empty, and an entry that cannot be written is dropped.
    """

    def __init__(self, file: Path | None = None):
        self.file = cache_root() / "chat-history.jsonl" if file is None else file

    def entries(self) -> list[str]:
        """Return the last entries, oldest first. A file that is too long is cut down to these (`MOST_ENTRIES`)."""
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
        """Return the text of the line that is being typed, such as when Ctrl-C was pressed; empty without readline."""
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


def piped_questions() -> Iterator[str] | None:
    """Return an iterator over the non-blank lines of standard input, as they arrive. None at a terminal.

    The first question is read at once, so that its errors are raised before a model is loaded.

    Raises:
        UsageError: a line is a command, is not text in UTF-8, or is far too long; or there is no question.
    """
    if sys.stdin is not None and sys.stdin.isatty():
        return None
    questions = _lines()
    return chain([next(questions)], questions)


def _lines() -> Iterator[str]:
    number = asked = 0
    if sys.stdin is not None:
        wait_for_stdin()
    while sys.stdin is not None and (line := sys.stdin.buffer.readline(MOST + 1)):
        number += 1
        if len(line) > MOST:
            raise UsageError(
                f"standard input line {number} is longer than {MOST >> 20} MiB; give one question per line"
            )
        if number == 1 and (encoding := marked_encoding(line)) != UTF_8:
            # Input is split at newline bytes, to answer each question as it arrives. Only UTF-8 allows that.
            raise UsageError(
                f"standard input is text in {encoding.upper()}; convert it to UTF-8, for example with iconv"
            )
        try:
            question = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise UsageError(
                f"standard input line {number} is not text in UTF-8; convert it to UTF-8, for example with iconv"
            ) from None
        if "\0" in question:
            raise UsageError(
                f"standard input line {number} contains zero bytes, as UTF-16 text does; convert it to UTF-8, for "
                "example with iconv"
            )
        # As in `read_lines`, a carriage return ends a line in a text without newlines.
        only = number == 1 and not line.endswith(b"\n")
        for place, one in enumerate(question.split("\r") if only else [question], number):
            if one.strip():
                asked += 1
                yield _no_command(one, place)
    if not asked:
        raise UsageError(
            "no question: write one question per line to standard input, or run `sparsekv chat` at a terminal"
        )


WITH_OPTIONS = ("method", "budget", "stats")
"""Commands for which `chat` has an option of the same name."""
_SHOWN = 60
"""Maximum number of characters of a line that a message shows."""


def _no_command(line: str, number: int) -> str:
    """Return the question that a line asks. A line that begins with // and a command's name loses its first slash.

    Raises:
        UsageError: the line would be a command at a terminal.
    """
    first = line.split(" ")[0]
    name = first.removeprefix("/")
    if name in COMMANDS and first.startswith("/"):
        told = shortened(line.strip(), _SHOWN)
        instead = f" and give --{name} instead" if name in WITH_OPTIONS else ""
        raise UsageError(
            f"standard input line {number}: {told} is a command, and commands work only at a terminal; "
            f"delete the line{instead}, or, if it is a question, write /{told} to ask it"
        )
    return line[1:] if first.startswith("//") and first.removeprefix("//") in COMMANDS else line


BARE = {"exit": "/quit", "quit": "/quit", "help": "/help"}
"""Words without a slash that other chat programs use to leave or to show help, with the command for each."""
HOW = "Ctrl-D or /quit leaves, /help lists commands"


def converse(session: Chat) -> None:
    """Answer what the user types, until the user leaves."""
    lines, interrupts = Lines(History(), completions), session.interrupts
    with interrupts.handled():
        while not session.left:
            try:
                entry = lines.read()
                interrupts.reset()
                _answer(session, entry)
            except EOFError:
                note("", quiet=False)
                session.left = True
            except KeyboardInterrupt:
                note("", quiet=False)
                note(HOW, quiet=bool(lines.typed()))
            except SparsekvError as error:
                note(f"error: {error}", quiet=False)


def _answer(session: Chat, entry: str) -> None:
    """Run an entry as a command, or answer it as a question. An error is printed as one line. With --debug, an
    unexpected error is raised instead."""
    entry = BARE.get(entry.strip(), entry)
    before = len(session.talk.turns), session.talk.config
    try:
        if is_command(entry):
            run_command(session, entry)
        elif entry.strip():
            session.ask(as_question(entry))
    except (Exception, KeyboardInterrupt) as error:
        if session.interrupts.came:
            same = before == (len(session.talk.turns), session.talk.config)
            done = "the talk is as it was before" if same else "what was entered has taken effect"
            note(f"interrupted; {done}", quiet=False)
        elif "--debug" in sys.argv and not isinstance(error, SparsekvError):
            raise
        else:
            note(f"error: {describe(error, 'chat')}", quiet=False)
