"""Documents: text of a file, a pipe or standard input, read in an encoding, and refused if it is not text."""

import codecs
import hashlib
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

from sparsekv.formats.errors import SparsekvError, UsageError, reason_of
from sparsekv.formats.index.schema import MANIFEST

PATIENCE = 10.0
"""Seconds to wait until somebody opens a named pipe for writing."""
_READ_BYTES = 2**20


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
    """Read all bytes of a source, or the first `most`. Raises what `open_source` raises."""
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
            data = self._read(min(len(buffer), _READ_BYTES))
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
    return SparsekvError(f"cannot read {name}: {reason_of(error)}; allow reading it, or name another text")


UTF_8 = "utf-8"
_PIECE = 2**20  # bytes
_MARKS = {"utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)}
"""Byte order marks of encodings whose order of bytes is not in their names."""
_MARKABLE = (UTF_8, "utf-8-sig")
"""Encodings in which no text begins with a mark of `_MARKS`, so that the mark decides."""


class Document:
    """A text read in pieces: everything read is checked and hashed, and what `first` or `whole` returned is kept.

    A byte order mark at the start is dropped, and one of UTF-16 or UTF-32 is followed instead of UTF-8. Each method but
    `of` raises UsageError if what it reads is not text in its encoding, or if the whole text is white space.

    Args:
        encoding: one that `check_encoding` returns.
    """

    def __init__(self, name: str, reader: BinaryIO, encoding: str = UTF_8):
        self._name, self._reader, self._encoding = name, reader, encoding
        self._decoder, self._sum = codecs.getincrementaldecoder(encoding)(), hashlib.sha256()
        self._decoded = 0  # bytes
        self._kept: list[str] = []
        self._characters, self._begun, self._ended, self._blank = 0, False, False, True

    @classmethod
    def of(cls, text: str) -> "Document":
        """A document from a string, which is not checked."""
        document = cls("", io.BytesIO())
        document._kept, document._characters, document._ended = [text], len(text), True
        document._sum.update(text.encode())
        return document

    def first(self, characters: int) -> str:
        """The first `characters` characters, or all if there are fewer; not to be called after `sha256`."""
        while not self._ended and self._characters < characters:
            piece = self._read()
            self._kept.append(piece)
            self._characters += len(piece)
        return "".join(self._kept)[:characters]

    def whole(self) -> str:
        """The whole text; not to be called after `sha256`."""
        while not self._ended:
            self._kept.append(self._read())
        return "".join(self._kept)

    def sha256(self) -> str:
        """The sha256 of the text in UTF-8 without a byte order mark, in hex; reads the rest without keeping it."""
        while not self._ended:
            self._read()
        return self._sum.hexdigest()

    def _read(self) -> str:
        data = self._reader.read(_PIECE)
        self._ended = not data
        if not self._decoded:
            self._encoding = marked_encoding(data, self._encoding)
            self._decoder = codecs.getincrementaldecoder(self._encoding)()
            self._check_mark(data)
        try:
            text = self._decoder.decode(data, final=self._ended)
            if text and not self._begun:
                text, self._begun = text.removeprefix("\ufeff"), True
            self._sum.update(text.encode())
        except UnicodeError as error:
            where = undecodable(error, self._encoding, self._decoded + len(data))
            raise UsageError(f"{self._name} {where}{_way_out(data)}") from None
        self._decoded += len(data)
        if "\0" in text:
            raise UsageError(f"{self._name} is not text: it contains zero bytes{_way_out(data)}")
        self._blank = self._blank and not text.strip()
        if self._ended and self._blank:
            raise UsageError(f"{self._name} is empty; give a document with text in it")
        return text

    def _check_mark(self, data: bytes) -> None:
        """Raise UsageError for UTF-16 or UTF-32 without the mark that tells the order of its bytes."""
        marks = _MARKS.get(self._encoding)
        if data and marks and not data.startswith(marks):
            raise UsageError(
                f"{self._name} has no byte order mark; give --encoding {self._encoding}-le, or {self._encoding}-be"
            )


def check_encoding(name: str) -> str:
    """Return Python's name of a text encoding. Raises UsageError if the name is unknown, or is no text encoding."""
    try:
        found = codecs.lookup(name)
        codecs.getincrementaldecoder(name)
        "a".encode(name)
    except (LookupError, ValueError):
        raise UsageError(
            f"--encoding {name}: no such encoding of text; give utf-8, utf-16, latin-1 or cp1252"
        ) from None
    return found.name


def marked_encoding(data: bytes, encoding: str = UTF_8) -> str:
    """UTF-16 or UTF-32 if a text's first bytes are its byte order mark and `encoding` is UTF-8, or `encoding`."""
    # UTF-32 first: its mark begins with that of UTF-16, and a text has no zero character behind it.
    marked = [name for name, marks in reversed(_MARKS.items()) if data.startswith(marks)]
    return marked[0] if marked and encoding in _MARKABLE else encoding


def undecodable(error: UnicodeError, encoding: str, end: int) -> str:
    """The predicate of an error message for a text with a byte that its encoding lacks.

    Args:
        end: bytes of the text up to the end of those that the decoder was given.
    """
    said = f"is not text in {encoding.upper()}"
    if not isinstance(error, UnicodeDecodeError):
        return said
    return f"{said} at byte offset {end - len(error.object) + error.start:,}"


def decode_text(data: bytes, name: str) -> str:
    """Decode a whole text from UTF-8, or UTF-16 or UTF-32 with a byte order mark, which is dropped.

    Raises:
        UsageError: it is not text in that encoding.
    """
    encoding = marked_encoding(data)
    try:
        text = data.decode(encoding).removeprefix("\ufeff")
    except UnicodeError as error:
        where = undecodable(error, encoding, len(data))
        raise UsageError(f"{name} {where}; convert it to UTF-8 first, such as by iconv") from None
    if "\0" in text:
        # UTF-16 of plain English is UTF-8 too, with a zero byte behind each letter.
        raise UsageError(f"{name} is not text: it contains zero bytes; convert it to UTF-8 first, such as by iconv")
    return text


def _way_out(data: bytes) -> str:
    """The remedy for a text that is in another encoding."""
    zeros = [data[start:1000:2].count(0) for start in (0, 1)]
    if max(zeros) > len(data[:1000]) // 4 > 2 * min(zeros):
        return f", as UTF-16 does; give --encoding utf-16-{'le' if zeros[1] > zeros[0] else 'be'}"
    if 0 in data:
        return "; convert it to plain text first"
    return "; give its encoding, such as --encoding latin-1, or convert it to plain text first"


@contextmanager
def open_document(source: str, *, whole: bool, encoding: str = UTF_8) -> Iterator[Document]:
    """Open the document in a file, or on standard input for `-`.

    Args:
        whole: read all of it now; otherwise only its first MiB, which mostly suffices to find that it is not text.
        encoding: the text's, by any of its names.

    Raises:
        UsageError: no such file or encoding, a folder, one that may not be read, empty, or not text in the encoding.
        SparsekvError: reading it failed.
    """
    known = check_encoding(encoding)
    with open_source(source) as reader:
        document = Document("standard input" if source == "-" else source, reader, known)
        if whole:
            document.whole()
        else:
            document.first(_PIECE)
        yield document


def read_document(source: str, encoding: str = UTF_8) -> str:
    """Text of a file, or of standard input for `-`; raises what `open_document` raises."""
    with open_document(source, whole=True, encoding=encoding) as document:
        return document.whole()
