"""Reads questions from a pipe or a file: every line is one, whatever it begins with."""

import sys
from collections.abc import Iterator

from sparsekv.cli.common.questions import MOST
from sparsekv.formats.errors import UsageError


def is_piped() -> bool:
    """Whether nobody sits at standard input."""
    return sys.stdin is None or not sys.stdin.isatty()


def piped_questions() -> Iterator[str]:
    """The lines of standard input as they come, but for blank ones.

    Raises:
        UsageError: a line is not text in UTF-8, or far too long, or there is none.
    """
    number = asked = 0
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
            yield question
    if not asked:
        raise UsageError("no question: write one a line to standard input, or start it at a terminal")
