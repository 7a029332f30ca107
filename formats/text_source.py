"""Where a text comes from: a file, a pipe or standard input; nothing that a person may name here hangs."""

import io
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from sparsekv.formats.errors import SparsekvError, UsageError

PATIENCE = 10.0
"""Seconds for which a named pipe that nobody has opened to write is waited for."""
_PIECE = 2**20


@contextmanager
def open_source(source: str) -> Iterator[BinaryIO]:
    """Gives a reader of a file's bytes, or of standard input's for `-`; every error of its reads names the source.

    A pipe is read for as long as its writer takes; only one that nobody opens to write is given up.

    Raises:
        UsageError: no such file, a folder, a socket, or standard input that is closed.
        SparsekvError: it cannot be read, or nobody writes to the pipe.
    """
    if source == "-":
        if sys.stdin is None:
            raise UsageError("standard input is closed; name a file, or pass it a text")
        stdin: Any = sys.stdin.buffer  # one that buffers, which its type does not say
        yield io.BufferedReader(_Source(stdin.read1, "standard input"))
        return
    with _open(source) as file:
        reader = io.BufferedReader(_Source(file.read, source))
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            _await_writer(file, reader)
        os.set_blocking(file.fileno(), True)
        yield reader


def read_bytes(source: str, *, most: int | None = None) -> bytes:
    """All bytes of what `open_source` opens, or the first `most`; raises what it raises."""
    with open_source(source) as reader:
        return reader.read(-1 if most is None else most)


class _Source(io.RawIOBase):
    """Reads by a function of a number of bytes; `waiting` says that its last read had nothing yet."""

    def __init__(self, read: Callable[[int], bytes | None], name: str):
        self._read, self.name, self.waiting = read, name, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        try:
            data = self._read(min(len(buffer), _PIECE))
        except OSError as error:
            raise _unreadable(self.name, error) from None
        self.waiting = data is None
        if data is None:
            return None
        buffer[: len(data)] = data
        return len(data)


def _open(source: str) -> io.FileIO:
    """Without waiting for a pipe's writer, as an open otherwise does for ever."""
    try:
        if stat.S_ISSOCK(os.stat(source).st_mode):
            raise UsageError(f"{source} is a socket; name a text file")
        return io.FileIO(source, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise UsageError(f"no such file: {source or 'its name is empty'}") from None
    except IsADirectoryError:
        raise UsageError(f"{source} is a folder; name a text file in it") from None
    except OSError as error:
        raise _unreadable(source, error) from None


def _await_writer(file: io.FileIO, reader: "io.BufferedReader[_Source]") -> None:
    """Return when the pipe has data or a writer, or had one; a pipe without a name has had all that it will have."""
    named = not os.readlink(f"/proc/self/fd/{file.fileno()}").startswith("pipe:")
    events = select.poll()
    events.register(file, select.POLLIN)
    end = time.monotonic() + PATIENCE
    while not reader.peek(1) and not reader.raw.waiting and named and not events.poll(100):
        if time.monotonic() > end:
            raise SparsekvError(
                f"{reader.raw.name}: nobody writes to this pipe; start what writes to it, or name a file"
            )


def _unreadable(name: str, error: OSError) -> SparsekvError:
    reason = (error.strerror or str(error)).lower()
    return SparsekvError(f"cannot read {name}: {reason}; allow reading it, or name another text")
