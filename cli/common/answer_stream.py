"""An answer on stdout while it comes: on a terminal its lines are broken between words."""

import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.cells import cell_len

from sparsekv.cli.common.console import say, stderr
from sparsekv.cli.common.printable import printable


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
