"""Reads questions from a pipe or a file: every line is one, and none is a command, which may be somebody else's."""

import sys
from collections.abc import Iterator

import sparsekv.cli.chatting.commands
import sparsekv.cli.chatting.trace  # noqa: F401  # registers it, as the one before does
from sparsekv.cli.chatting.slash import COMMANDS
from sparsekv.cli.common.questions import MOST
from sparsekv.formats.documents.text_source import wait_for_stdin
from sparsekv.formats.errors import UsageError


def is_piped() -> bool:
    """Whether nobody sits at standard input."""
    return sys.stdin is None or not sys.stdin.isatty()


def piped_questions() -> Iterator[str]:
    """The lines of standard input as they come, but for blank ones.

    Raises:
        UsageError: a line is a command, not text in UTF-8, or far too long, or there is none.
    """
    number = asked = 0
    if sys.stdin is not None:
        wait_for_stdin()
    while sys.stdin is not None and (line := sys.stdin.buffer.readline(MOST + 1)):
        number += 1
        if len(line) > MOST:
            raise UsageError(f"standard input line {number} is longer than {MOST >> 20} MiB; questions are short")
        try:
            question = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise UsageError(f"standard input line {number} is not text in UTF-8; convert it first") from None
        if question.strip():
            asked += 1
            yield _no_command(question, number)
    if not asked:
        raise UsageError("no question: write one a line to standard input, or start it at a terminal")


def _no_command(line: str, number: int) -> str:
    """A line, or what stands behind the first / of one that asks for the name of a command.

    Raises:
        UsageError: it would be a command at a terminal.
    """
    first = line.split(" ")[0]
    if first.removeprefix("/") in COMMANDS and first.startswith("/"):
        raise UsageError(
            f"standard input line {number}: {first} is a command at a terminal alone, and here every line is a "
            f"question; leave it out (options do what commands do), or write /{first} to ask it"
        )
    return line[1:] if first.startswith("//") and first.removeprefix("//") in COMMANDS else line
