"""Questions read from an argument, a file or standard input, and answers written to stdout word by word."""

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
    """Whether a note may show in the middle of an answer: stdout is a terminal, or a pipe that may lead to one."""
    with suppress(OSError, ValueError):  # no file of the system's
        return not stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    return stderr.is_terminal


def _columns() -> int:
    """The terminal's width, which $COLUMNS of a shell that started others may not be."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or shutil.get_terminal_size().columns
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


class AnswerStream:
    """Prints the pieces of one answer after another.

    A terminal breaks lines anywhere, in the middle of words too. So there a word waits for its end, and begins a
    new line where the old one has no room for it. Elsewhere the text stays as it is.
    """

    def __init__(self) -> None:
        self.begun = False
        self._column, self._blanks, self._word = 0, "", ""

    def add(self, piece: str) -> None:
        """Print a piece."""
        self.begun = True
        say(self._wrapped(printable(piece)) if sys.stdout.isatty() else piece, end="")

    def end(self) -> None:
        """End the answer's line; the next piece is another answer's."""
        say(self._end_of_word() + self._blanks if sys.stdout.isatty() else "")
        self.begun, self._column, self._blanks = False, 0, ""

    @contextmanager
    def ending_lines(self) -> Iterator[None]:
        """On a terminal, let what follows an answer that broke off begin a line of its own."""
        try:
            yield
        finally:
            if self.begun and sys.stdout.isatty():
                self.end()

    def _wrapped(self, text: str) -> str:
        """The part of a text that can be written: all but a last word, which may go on, and the blanks before it."""
        width, out = _columns(), []
        for character in text:
            if character == "\n":
                out += [self._end_of_word(), self._blanks, "\n"]
                self._column, self._blanks = 0, ""
            elif character.isspace():
                out.append(self._end_of_word())
                self._blanks += character
            else:
                # Lines of wide characters, such as Chinese, are broken between any two of them.
                wide = cell_len(character) > 1
                if wide or cell_len(self._word) >= width:
                    out.append(self._end_of_word())
                self._word += character
                if wide:
                    out.append(self._end_of_word())
        return "".join(out)

    def _end_of_word(self) -> str:
        """The word that has come, after its blanks or in a new line."""
        if not self._word:
            return ""
        width, cells = _columns(), cell_len(self._word)
        before, column = self._blanks, self._column + cell_len(self._blanks.expandtabs())
        if self._column and column + cells > width:
            before, column = "\n", 0
        written, self._word, self._blanks = before + self._word, "", ""
        self._column = (column + cells - 1) % width + 1  # of a word longer than a line the terminal makes several
        return written


MOST = 2**28
"""Bytes of questions in one file: more would be a device that never ends."""


def read_question(argument: str | None, file: str | None) -> str:
    """One question, without the newline at its end.

    Raises:
        UsageError: no question or two were given, or the file cannot be read.
    """
    if argument is not None and file is not None:
        raise UsageError("give the question once: as an argument or with --prompt-file")
    if argument is not None and argument != "-":
        return argument
    if argument is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("no question: give it as an argument, with --prompt-file or on standard input")
    return _read(file or "-", "--prompt-file").replace("\r\n", "\n").rstrip("\n")


def read_lines(file: str, option: str) -> list[str]:
    """Every line of a file or of standard input (`-`), blank ones too; only a newline ends a line.

    Raises:
        UsageError: the file cannot be read, or all its lines are blank.
    """
    lines = [line.removesuffix("\r").strip(" \t") for line in _read(file, option).removesuffix("\n").split("\n")]
    if not any(map(str.strip, lines)):
        raise UsageError(f"{option} {file} holds no question; write one a line")
    return lines


def read_questions(file: str, option: str) -> list[str]:
    """Every line of a file or of standard input that is not blank; raises what `read_lines` raises."""
    return [line for line in read_lines(file, option) if line.strip()]


def _read(file: str, option: str) -> str:
    name = "standard input" if file == "-" else f"{option} {file}"
    try:
        data = read_bytes(file, most=MOST + 1, option=option)
    except SparsekvError as error:
        raise UsageError(str(error)) from None
    if len(data) > MOST:
        raise UsageError(f"{name} is longer than {MOST >> 20} MiB; questions are short, give fewer at once")
    return decode_text(data, name)
