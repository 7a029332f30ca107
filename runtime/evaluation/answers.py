"""Answers on disk: one per line in an append-only file, so that a killed run continues where it stopped."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from filelock import FileLock, Timeout

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.errors import SparsekvError

FILE = "answers.jsonl"


@dataclass(frozen=True)
class Given:
    """A model's answer to one question: a text, or for a continuation the mean loss per token, in nats.

    `kv_fraction` is None for one token, which takes no step, but with dense attention.
    """

    text: str
    loss: float | None
    kv_fraction: float | None
    seconds: float


def answer_key(decides: dict[str, Any]) -> str:
    """The key of an answer: a hash of everything that determines it."""
    return hash_json(decides)


class Answers:
    """The answers in a folder, by key. Use it as a context manager; one process at a time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._lock = FileLock(folder / f".{FILE}.lock", timeout=0)
        self._file: IO[bytes] | None = None
        self.known: dict[str, Given] = {}

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            self._file = self._path.open("a+b")
            self._load(self._file)
        except Timeout:
            raise SparsekvError(f"{self._path.parent} is in use by another run; wait for it or give --work") from None
        except OSError as error:
            raise SparsekvError(f"cannot write {self._path}: {error.strerror or error}; give another --work") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._file is not None:
                with suppress(OSError):  # of a disk that is full, which was told when the answer was added
                    self._file.close()
        finally:
            self._lock.release()

    def add(self, key: str, given: Given, told: dict[str, Any]) -> None:
        """Write an answer to disk at once (fsync); `told` are extra fields for people who read the file.

        Raises:
            SparsekvError: the disk is full or gone.
        """
        self._append(json.dumps({"key": key, **asdict(given), **told}, ensure_ascii=False).encode() + b"\n")
        self.known[key] = given

    def take_over(self, other: "Answers") -> None:
        """Write another folder's answers, which is open too, but for those that are known.

        Raises:
            SparsekvError: the disk is full or gone.
        """
        assert other._file is not None
        other._file.seek(0)
        lines = other._file.read().splitlines(keepends=True)
        self._append(b"".join(line for line in lines if json.loads(line)["key"] not in self.known))
        self.known = other.known | self.known

    def _append(self, lines: bytes) -> None:
        assert self._file is not None
        try:
            self._file.write(lines)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise SparsekvError(f"cannot write {self._path}: {error.strerror or error}") from None

    def _load(self, file: IO[bytes]) -> None:
        """Read all answers; an incomplete last line, left by a killed run, is removed."""
        file.seek(0)
        data = file.read()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                record = json.loads(line)
                self.known[record["key"]] = Given(**{name: record[name] for name in Given.__dataclass_fields__})
            except (ValueError, KeyError, TypeError, RecursionError):
                raise SparsekvError(
                    f"line {number} of {self._path} is damaged; remove it, and its question is asked again"
                ) from None
        file.truncate(whole)  # only after every line was valid, so that another program's file is not changed
