"""Resume an interrupted batch of questions: read the answers that a file already has, and append the missing
answers."""

import errno
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from sparsekv.cli.common.streams import json_text
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.runtime.selection.interface import Budget

FIRST_FIELD = '{"question": '
"""The beginning of each line of the file of `--resume`."""


def _refuse_questions_file(file: Path, questions: str | None) -> None:
    """Raise UsageError if the file of answers is also the file of questions."""
    with suppress(OSError):
        if questions is not None and os.path.samefile(file, questions):
            raise UsageError(f"--resume {file}: this is the file of the questions; name another file for the answers")


def _refuse_redirected_to(file: Path) -> None:
    """Raise UsageError if standard output is redirected to the file. Each answer would be written twice."""
    try:
        same = os.path.samestat(os.fstat(sys.stdout.fileno()), file.stat())
    except (OSError, ValueError):  # the file does not exist yet, or standard output has no descriptor
        return
    if same:
        raise UsageError(
            f"--resume {file}: standard output is redirected to the same file, and --resume itself writes the "
            "answers to it; leave the redirection out"
        )


def _same(found: Any, value: Any) -> bool:
    """Whether two values are equal in JSON.

    For Python's `==`, 1, 1.0 and true are equal too. But a budget of 1 is one token, and a budget of 1.0 is all tokens.
    """
    return json.dumps(found, sort_keys=True) == json.dumps(value, sort_keys=True)


def _differing(name: str, found: Any, value: Any) -> str:
    """Describe the options of a stored setting that differ from the requested ones, as a user types them.

    A setting with several parameters has an option for each of them.
    """
    if isinstance(found, dict) and isinstance(value, dict):
        names = [one for one in found | value if not _same(found.get(one), value.get(one))]
        return " and ".join(_differing(one, found.get(one), value.get(one)) for one in names)
    option = f"--{name.replace('_', '-')}"
    if not _is_given(found):
        return f"without {_typed(option, value)}"
    other = f", not {_text(option, value)}" if _is_given(value) and value is not True else ""
    return f"with {_typed(option, found)}{other}"


def _setting(record: dict[str, Any], name: str, missing: Any) -> Any:
    """Return a field of a line or of its `settings`; `missing` if there is none."""
    held = record.get("settings")
    return (record | (held if isinstance(held, dict) else {})).get(name, missing)


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def _typed(option: str, value: Any) -> str:
    return option if value is True else f"{option} {_text(option, value)}"


def _text(option: str, value: Any) -> str:
    if option == "--budget" and isinstance(value, int | float):
        return str(Budget(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


OTHERWISE = {
    "index": "over another index",
    "code": "by another version of the method's package",
    "eos_tokens": "with other EOS tokens (the model's generation_config.json)",
    "layer_budgets": "with other budgets of single layers (--schedule)",
}
"""Phrases for messages, by a setting that has no option or whose value is too long for a message."""


@contextmanager
def ignored(*numbers: int) -> Iterator[None]:
    """Within the context, ignore OSErrors with these errno values."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


class AnswersFile:
    """A file with one line of JSON for each question answered so far, in order, as `generate --json` prints it.

    Args:
        questions_file: the file of the questions, which must be another file.
        questions: all questions of the batch, including blank ones.
        setting: fields that every line must have, such as the method.
        settings: values that the field `settings` of every line must have.
        default: the index's default method, if `--method auto` has chosen it or dense attention; else None.

    Raises:
        UsageError: the file cannot be read, is not a regular file, or is the file of the questions; standard output
            goes to the file; a line is no answer, or has another question or other settings; or there are more lines
            than questions.
    """

    def __init__(
        self,
        file: Path,
        questions_file: str | None,
        questions: Sequence[str],
        setting: dict[str, Any],
        settings: dict[str, Any],
        *,
        default: str | None = None,
    ):
        _refuse_redirected_to(file)
        _refuse_questions_file(file, questions_file)
        self.file, self.settings, self.default = file, settings, default
        try:
            if file.exists() and not file.is_file():
                raise UsageError(
                    f"--resume {file}: this is not a regular file, so answers cannot be added to it; name another file"
                )
            content = file.read_bytes() if file.exists() else b""
        except OSError as error:
            raise UsageError(
                f"--resume {file} cannot be read: {error.strerror}; name a file that you may read"
            ) from None
        self.lines: list[str] = []
        self._lock: IO[bytes] | None = None
        # A last line without a newline was being written when the run was killed.
        *whole, unfinished = content.split(b"\n")
        for number, line in enumerate(whole, 1):
            self._check(line, number, questions, setting)
            self.lines.append(line.decode())
        self._found, self._whole = len(content), len(content) - len(unfinished)
        self._check_unfinished(unfinished, len(whole) + 1, questions)

    def _check_unfinished(self, line: bytes, number: int, questions: Sequence[str]) -> None:
        """Raise UsageError for an unfinished last line that is not the beginning of the next question's answer.

        Such a beginning is left when a run is killed, and `begin` removes it. Zero bytes at the end, which a power
        failure can leave, are ignored here and removed too.
        """
        begun = (FIRST_FIELD + json_text(questions[number - 1])).encode() if number <= len(questions) else b""
        line = line.rstrip(b"\0")
        if line and not (begun and line[: len(begun)] == begun[: len(line)]):
            raise UsageError(
                f"--resume {self.file}: line {number} is not an answer as --json prints it, nor the beginning of "
                "one; name another file"
            )

    def _check(self, line: bytes, number: int, questions: Sequence[str], setting: dict[str, Any]) -> None:
        try:
            record = json.loads(line.decode())
            question = record["question"]
        except (ValueError, TypeError, KeyError):
            raise UsageError(
                f"--resume {self.file}: line {number} is not an answer as --json prints it; name another file"
            ) from None
        if number > len(questions):
            raise UsageError(
                f"--resume {self.file}: the file has more answers than the {len(questions)} questions given; give "
                "all questions that it answers, or name another file"
            )
        if question != questions[number - 1]:
            raise UsageError(f"--resume {self.file}: line {number} answers another question; name another file")
        for name, value in (setting | self.settings).items():
            # A line that an earlier version wrote lacks the options that did not exist then.
            before = _setting(record, name, False if value is False else None)
            if not _same(before, value):
                self._refuse(number, name, before, value)

    def _refuse(self, number: int, name: str, before: Any, value: Any) -> NoReturn:
        other = OTHERWISE.get(name) or _differing(name, before, value)
        remedy = "give the settings of that line, or name another file"
        if name == "method":
            same = "leave --method out" if before == self.default else f"give --method {before}"
            remedy = f"{same}, or name another file"
            if self.default is not None:
                other = f"with --method {before}, and --method auto takes {value} now"
        raise UsageError(f"--resume {self.file}: line {number} was answered {other}; {remedy}")

    def check_eos_tokens(self, tokens: list[int]) -> None:
        """Raise UsageError if the answer of a line could end at other EOS tokens than these.

        Lines that an earlier version wrote do not have them.
        """
        for number, line in enumerate(self.lines, 1):
            before = _setting(json.loads(line), "eos_tokens", tokens)
            if before != tokens:
                self._refuse(number, "eos_tokens", before, tokens)

    def begin(self) -> list[str]:
        """Cut the file after its last whole line, and return its lines.

        Also lock the file against other runs until this process ends, if the file system has locks.

        Raises:
            UsageError: the file cannot be written, another run adds to it, or it has changed since it was read.
        """
        try:
            self._lock = self.file.open("ab")
            with ignored(errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):  # the file system has no locks
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._lock.fileno()).st_size != self._found:
                raise UsageError(f"--resume {self.file} was changed by another process; run the same command again")
            self._lock.truncate(self._whole)
        except BlockingIOError:
            raise UsageError(
                f"--resume {self.file}: another run is adding answers to it; wait until that run ends, or stop it"
            ) from None
        except OSError as error:
            remedy = "create its folder, get permission to write there, or name another file"
            raise UsageError(f"--resume {self.file} cannot be written: {error.strerror}; {remedy}") from None
        return self.lines

    def add(self, line: str) -> None:
        """Append a line to the file; call `begin` first.

        Raises:
            SparsekvError: the file cannot be written.
        """
        try:
            with self.file.open("ab") as out:
                out.write(f"{line}\n".encode())
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            remedy = "free space or get permission there, and run the same command again"
            raise SparsekvError(f"--resume {self.file} cannot be written: {why}; {remedy}") from None
