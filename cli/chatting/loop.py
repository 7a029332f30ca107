"""Run a chat: a loop over questions and commands at a terminal, or over questions from a pipe."""

import sys
from collections.abc import Iterator
from itertools import chain

from sparsekv.cli.chatting.lines import History, Lines
from sparsekv.cli.chatting.session import Chat
from sparsekv.cli.chatting.slash import COMMANDS, as_question, completions, is_command, run_command
from sparsekv.cli.common.console import note
from sparsekv.cli.common.failures import describe
from sparsekv.cli.common.questions import MOST
from sparsekv.formats.documents.document import UTF_8, marked_encoding, wait_for_stdin
from sparsekv.formats.errors import SparsekvError, UsageError


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


def _no_command(line: str, number: int) -> str:
    """Return the question that a line asks. A line that begins with // and a command's name loses its first slash.

    Raises:
        UsageError: the line would be a command at a terminal.
    """
    first = line.split(" ")[0]
    if first.removeprefix("/") in COMMANDS and first.startswith("/"):
        raise UsageError(
            f"standard input line {number}: {first} is a command, and commands work only at a terminal; "
            f"delete the line and give the command's option instead, or, if it is a question, write /{first} "
            "to ask it"
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
