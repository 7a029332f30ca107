"""Where questions come from: an argument, a file or standard input."""

import sys
from pathlib import Path

from sparsekv.formats.errors import UsageError


def read_question(argument: str | None, file: str | None) -> str:
    """One question, without the newline at its end.

    Raises:
        UsageError: it was given twice or not at all, or the file cannot be read.
    """
    if argument is not None and file is not None:
        raise UsageError("give the question once: as an argument or with --prompt-file")
    if argument is not None and argument != "-":
        return argument
    if argument is None and file is None and sys.stdin.isatty():
        raise UsageError("no question: give it as an argument, with --prompt-file or on standard input")
    return _read(file or "-", "--prompt-file").rstrip("\n")


def read_questions(file: str, option: str) -> list[str]:
    """The questions of a file or of standard input (`-`), one a line; empty lines do not count.

    Raises:
        UsageError: the file cannot be read or holds none.
    """
    questions = [line.strip() for line in _read(file, option).splitlines() if line.strip()]
    if not questions:
        raise UsageError(f"{option} {file} holds no question; write one a line")
    return questions


def _read(file: str, option: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} {file}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{option} {file} is not text in UTF-8") from None
