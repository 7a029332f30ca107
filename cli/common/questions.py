"""Read questions from an argument, a file or standard input."""

import sys

from sparsekv.formats.documents.document import decode_text
from sparsekv.formats.documents.text_source import read_bytes
from sparsekv.formats.errors import SparsekvError, UsageError

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
