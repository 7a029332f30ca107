"""Reads a text from a file, a pipe or standard input, without hanging on anything that a user may name."""

import io
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.schema import MANIFEST

PATIENCE = 10.0
"""Seconds to wait until somebody opens a named pipe for writing."""
_PIECE = 2**20


@contextmanager
def open_source(source: str, *, option: str = "") -> Iterator[BinaryIO]:
    """Open a file, or standard input for `-`, for reading bytes; all errors while reading name the source.

    A pipe is read for as long as its writer takes; only a pipe that nobody opens for writing is an error.

    Args:
        option: the option by which the user named the file, for error messages.

    Raises:
        UsageError: no such file, one that may not be read, a folder, a socket, or standard input that is closed.
        SparsekvError: reading it failed, or nobody writes to the pipe.
    """
    if source == "-":
        if sys.stdin is None:
            raise UsageError("standard input is closed; name a file, or pass it a text")
        wait_for_stdin()
        stdin: Any = sys.stdin.buffer  # has `read1`, although its declared type does not
        yield io.BufferedReader(_Source(stdin.read1, "standard input"))
        return
    name = f"{option} {source or repr('')}".lstrip()
    with _open(source, name) as file:
        reader = io.BufferedReader(_Source(file.read, name))
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            _await_writer(file, reader)
        os.set_blocking(file.fileno(), True)
        yield reader


def wait_for_stdin() -> None:
    """Have reads of standard input wait for its writer, whatever another program set of the pipe that both have: what
    has not come yet would be taken for its end. That program's own reads of it wait from then on, too."""
    with suppress(OSError, ValueError):  # it is no file of the system's
        os.set_blocking(sys.stdin.fileno(), True)


def read_bytes(source: str, *, most: int | None = None, option: str = "") -> bytes:
    """All bytes of what `open_source` opens, or the first `most`; raises what it raises."""
    with open_source(source, option=option) as reader:
        return reader.read(-1 if most is None else most)


class _Source(io.RawIOBase):
    """Raw reader over a function that reads up to a number of bytes; `waiting`: the last read found no data yet."""

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


def _open(source: str, name: str) -> io.FileIO:
    """Open a file without waiting for a pipe's writer, as a plain open would, without limit."""
    try:
        if stat.S_ISSOCK(os.stat(source).st_mode):
            raise UsageError(f"{name} is a socket; name a text file")
        return io.FileIO(source, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise UsageError(f"no such file: {name}") from None
    except IsADirectoryError:
        if (Path(source) / MANIFEST).exists():
            raise UsageError(f"{name} is an index; name a text file") from None
        raise UsageError(f"{name} is a folder; name a text file in it") from None
    except PermissionError as error:
        raise UsageError(str(_unreadable(name, error))) from None
    except OSError as error:
        raise _unreadable(name, error) from None


def _await_writer(file: io.FileIO, reader: "io.BufferedReader[_Source]") -> None:
    """Return when the pipe has data, or has or had a writer; unnamed pipes get no new writer and are not waited for."""
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
