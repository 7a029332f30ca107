"""Read questions from an argument, a file or standard input, and write answers to stdout as they are generated."""

import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.cells import cell_len

from sparsekv.cli.common.console import say, stderr
from sparsekv.cli.common.streams import printable
from sparsekv.formats.documents.document import decode_text, read_bytes
from sparsekv.formats.errors import SparsekvError, UsageError


def answer_may_meet_notes() -> bool:
    """Whether a note may appear in the middle of an answer on a terminal.

    True unless stdout is a regular file, because the reader of a pipe may write to a terminal, too. If stdout has no
    file descriptor, True if stderr is a terminal.
    """
    with suppress(OSError, ValueError):  # stdout has no file descriptor
        return not stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    return stderr().is_terminal


def _columns() -> int:
    """Return the terminal's width in columns. `$COLUMNS` is used only if the terminal does not report a width,
    because it may come from a parent shell."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or shutil.get_terminal_size().columns
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


class AnswerStream:
    """Prints an answer piece by piece.

    A terminal breaks lines anywhere, even inside words. So on a terminal, a word is held back until it is complete, and
    begins a new line if it does not fit. Elsewhere the text is printed unchanged.
    """

    def __init__(self) -> None:
        self.begun = False
        self._column, self._blanks, self._word = 0, "", ""

    def add(self, piece: str) -> None:
        """Print a piece of the answer."""
        self.begun = True
        say(self._wrapped(printable(piece)) if sys.stdout.isatty() else piece, end="")

    def end(self) -> None:
        """End the answer's line. The next piece belongs to another answer."""
        say(self._end_of_word() + self._blanks if sys.stdout.isatty() else "")
        self.begun, self._column, self._blanks = False, 0, ""

    @contextmanager
    def ending_lines(self) -> Iterator[None]:
        """End the line of an answer that broke off within the context, so that later output on a terminal begins a
        new line."""
        try:
            yield
        finally:
            if self.begun and sys.stdout.isatty():
                self.end()

    def _wrapped(self, text: str) -> str:
        """Return the part of the text that can be printed now.

        The last word, with the blanks before it, is held back, because the next piece may continue the word.
        """
        width, out = _columns(), []
        for character in text:
            if character == "\n":
                out += [self._end_of_word(), self._blanks, "\n"]
                self._column, self._blanks = 0, ""
            elif character.isspace():
                out.append(self._end_of_word())
                self._blanks += character
            else:
                # A line may break between any two wide characters, such as Chinese.
                wide = cell_len(character) > 1
                if wide or cell_len(self._word) >= width:
                    out.append(self._end_of_word())
                self._word += character
                if wide:
                    out.append(self._end_of_word())
        return "".join(out)

    def _end_of_word(self) -> str:
        """Return the word that was held back, after its blanks or on a new line."""
        if not self._word:
            return ""
        width, cells = _columns(), cell_len(self._word)
        before, column = self._blanks, self._column + cell_len(self._blanks.expandtabs())
        if self._column and column + cells > width:
            before, column = "\n", 0
        written, self._word, self._blanks = before + self._word, "", ""
        self._column = (column + cells - 1) % width + 1  # the terminal breaks a word that is longer than a line
        return written


MOST = 2**28
"""Largest size of a file of questions in bytes. Longer input is taken for a device that never ends."""


def read_question(argument: str | None, file: str | None) -> str:
    """Return the question: `argument` unchanged, or the text of a file or of standard input.

    Line ends of a text become newlines, and newlines at the end of the text are removed.

    Raises:
        UsageError: no question or two questions are given, or the file cannot be read or is too long.
    """
    if argument is not None and file is not None:
        raise UsageError("give the question once: as an argument or with --prompt-file")
    if argument is not None and argument != "-":
        return argument
    if argument is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("no question: give it as an argument, with --prompt-file or on standard input")
    return _read(file or "-", "--prompt-file").replace("\r\n", "\n").rstrip("\n")


def read_lines(file: str, option: str) -> list[str]:
    """Return every line of a file or of standard input (`-`), including blank lines.

    Only a newline ends a line, or a carriage return in a text without newlines. Spaces and tabs around a line are
    removed.

    Raises:
        UsageError: the file cannot be read or is too long, or all its lines are blank.
    """
    text = _read(file, option)
    text = text if "\n" in text else text.replace("\r", "\n")
    lines = [line.removesuffix("\r").strip(" \t") for line in text.removesuffix("\n").split("\n")]
    if not any(map(str.strip, lines)):
        raise UsageError(f"{option} {file} holds no question; write one per line")
    return lines


def _read(file: str, option: str) -> str:
    name = "standard input" if file == "-" else f"{option} {file}"
    try:
        data = read_bytes(file, limit=MOST + 1, option=option)
    except SparsekvError as error:
        raise UsageError(str(error)) from None
    if len(data) > MOST:
        raise UsageError(f"{name} is longer than {MOST >> 20} MiB; split it, and ask fewer questions at once")
    return decode_text(data, name)
