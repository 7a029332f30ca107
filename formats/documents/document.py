"""Read a document's text from a file, a pipe or standard input, decode it, and raise an error if it is not text.

Encodings of texts are declared by a page, or detected from the bytes. The same bytes always give the same encoding.
"""

import codecs
import hashlib
import io
import os
import re
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from sparsekv.formats.documents import extracted
from sparsekv.formats.errors import SparsekvError, UsageError, reason_of
from sparsekv.formats.index.schema import MANIFEST

SURE = 0.2
"""Minimum confidence of a detected encoding. Of 1,375 texts in 36 languages that reached it, one was read wrongly."""
_READ = frozenset(
    {
        *("utf-8", "utf-16", "utf-16-le", "utf-16-be", "ascii", "koi8-r", "koi8-u", "cp874"),
        *(f"cp{number}" for number in range(1250, 1259)),
        *(f"iso8859-{part}" for part in range(1, 17)),
        *("cp932", "shift_jis", "euc_jp", "iso2022_jp", "euc_kr", "cp949", "iso2022_kr"),
        *("gb18030", "gbk", "gb2312", "hz", "big5", "big5hkscs"),
    }
)
"""Python's names of the encodings that are accepted when a page declares them or they are detected.

Encodings of DOS and Macintosh are left out, because texts in other encodings are too often detected as one of these.
Codecs of Python that take quadratic time, such as punycode, are left out, too.
"""
_BROWSERS = {"ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874"}
_BROWSERS |= {"gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs"}
"""Maps declared or detected encodings to encodings with more characters, in which browsers read such texts."""
_DECLARED = re.compile(rb"""<(?:meta\b[^>]*?\bcharset|\?xml\b[^>]*?\bencoding)\s*=\s*["']?\s*([\w.:-]{1,40})""", re.I)
_COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
_DECLARATION = 4096
"""Number of first bytes of a page in which it declares its encoding."""
_CONTROLS = re.compile("[\0-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f]")


def declared_encoding(page: bytes) -> str | None:
    """Return Python's name of the encoding in which to read an HTML page, from the page's own declaration.

    Returns None if the page declares no encoding, or if it declares UTF-16 or an encoding that is not in `_READ`.
    """
    found = _DECLARED.search(_COMMENT.sub(b"", page[:_DECLARATION]))
    name = None if found is None else _python_name(found[1].decode("ascii", "replace"))
    if name is None or name.startswith("utf-16"):  # a page whose declaration can be read is not in UTF-16
        return None
    return _BROWSERS.get(name, name)


def detected_encoding(data: bytes) -> str | None:
    """Return Python's name of the encoding of a text that is not UTF-8.

    Returns None if the encoding is not certain or not in `_READ`. Also returns None for bytes with control characters,
    which are not taken for text.
    """
    if _CONTROLS.search(data.translate(None, bytes(range(0x7F, 0x100))).decode("ascii")):
        return None
    import chardet  # imported here because few texts need it

    found = chardet.detect(data, max_bytes=max(len(data), 1))
    name = _python_name(found["encoding"] or "")
    if name is None or found["confidence"] < SURE:
        return None
    name = _BROWSERS.get(name, name)
    try:
        return None if _CONTROLS.search(data.decode(name)) else name
    except UnicodeError:
        return None


def western_encoding(data: bytes) -> str | None:
    """Return the Western European encoding in which bytes are text, latin-1 or cp1252; None for neither.

    Bytes of another encoding may also be text in one of these two, so the user has to confirm the encoding.
    """
    for name in ("latin-1", "cp1252"):
        try:
            if not _CONTROLS.search(data.decode(name)):
                return name
        except UnicodeError:
            continue
    return None


def _python_name(name: str) -> str | None:
    try:
        found = codecs.lookup(name).name
    except (LookupError, ValueError):
        return None
    return found if found in _READ else None


PATIENCE = 10.0
"""Seconds to wait until another process opens a named pipe for writing."""
_READ_BYTES = 2**20


@contextmanager
def open_source(source: str, *, option: str = "") -> Iterator[BinaryIO]:
    """Open a file, or standard input for `-`, for reading bytes. Errors while reading name the source.

    Reading a pipe waits for its writer without a time limit. A pipe that no process opens for writing within PATIENCE
    seconds is an error.

    Args:
        option: the option by which the user named the file, for error messages.

    Raises:
        UsageError: the source does not exist, is not readable, or is a folder, a socket or a closed standard input.
        SparsekvError: reading failed, or no process writes to the pipe.
    """
    if source == "-":
        if sys.stdin is None:
            raise UsageError("standard input is closed; name a file, or pipe a text to the command")
        wait_for_stdin()
        stdin: Any = sys.stdin.buffer  # has a method `read1` that its declared type lacks
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
    """Make standard input blocking.

    Another program that shares the pipe may have made the pipe non-blocking. A read before the next data arrive would
    then look like the end of the input. Reads of the other program block from now on, too.
    """
    with suppress(OSError, ValueError):  # standard input has no file descriptor
        os.set_blocking(sys.stdin.fileno(), True)


def read_bytes(source: str, *, limit: int | None = None, option: str = "") -> bytes:
    """Read all bytes of a source, or its first `limit` bytes. Raises the errors of `open_source`."""
    with open_source(source, option=option) as reader:
        return reader.read(-1 if limit is None else limit)


class _Source(io.RawIOBase):
    """Raw stream of bytes over the function `read`, which is called with the largest number of bytes to return.

    `waiting` is True if the source is non-blocking and had no data yet at the last read.
    """

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
    """Open a file in non-blocking mode, because a blocking open waits for a pipe's writer without a time limit.

    Raises the errors of `open_source`.
    """
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
    """Wait until the pipe has data, or a process has opened it for writing; raise SparsekvError after PATIENCE.

    Does not wait for an unnamed pipe, because no further process can open one.
    """
    named = not os.readlink(f"/proc/self/fd/{file.fileno()}").startswith("pipe:")
    events = select.poll()
    events.register(file, select.POLLIN)
    end = time.monotonic() + PATIENCE
    while not reader.peek(1) and not reader.raw.waiting and named and not events.poll(100):
        if time.monotonic() > end:
            raise SparsekvError(
                f"{reader.raw.name}: no program writes to this pipe; start the program that writes to it, or name "
                "a file"
            )


def _unreadable(name: str, error: OSError) -> SparsekvError:
    return SparsekvError(f"cannot read {name}: {reason_of(error)}; make it readable, or name another text")


UTF_8 = "utf-8"
_PIECE = 2**20  # bytes
_MARKS = {"utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)}
"""Byte order marks of the encodings whose names do not determine the byte order."""
_MARKABLE = (UTF_8, "utf-8-sig")
"""Encodings that are replaced if the text begins with a byte order mark of `_MARKS`: no text in UTF-8 begins so."""


class Document:
    """A text that is read in pieces, each of which is checked and hashed.

    `first` and `whole` keep in memory the pieces that they read. A byte order mark at the start is removed. A mark of
    UTF-16 or UTF-32 replaces the encoding UTF-8 by its own. The encodings `utf-16` and `utf-32` need a byte order mark.

    All methods except `of` raise UsageError if the bytes that they read are not text in the encoding or have a zero
    character. They also raise it if the whole text is white space.

    Args:
        encoding: a name that `check_encoding` has returned.

    Attributes:
        pages: index of each page's first character in the text; empty for a text without pages.
    """

    def __init__(self, name: str, reader: BinaryIO, encoding: str = UTF_8):
        self._name, self._reader, self._encoding = name, reader, encoding
        self._decoder, self._sum = codecs.getincrementaldecoder(encoding)(), hashlib.sha256()
        self._decoded = 0  # number of bytes
        self._kept: list[str] = []
        self._characters, self._begun, self._ended, self._blank = 0, False, False, True
        self.pages: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str, pages: tuple[int, ...] = ()) -> "Document":
        """Create a document from a string, without checking it."""
        document = cls("", io.BytesIO())
        document.pages = pages
        document._kept, document._characters, document._ended = [text], len(text), True
        document._sum.update(text.encode())
        return document

    def first(self, characters: int) -> str:
        """Return the first `characters` characters, or all if there are fewer. Must not be called after `sha256`."""
        while not self._ended and self._characters < characters:
            piece = self._read()
            self._kept.append(piece)
            self._characters += len(piece)
        return "".join(self._kept)[:characters]

    def whole(self) -> str:
        """Return the whole text. Must not be called after `sha256`."""
        while not self._ended:
            self._kept.append(self._read())
        return "".join(self._kept)

    def sha256(self) -> str:
        """Return the sha256, in hex, of the text in UTF-8 without a byte order mark.

        Reads the rest of the text without keeping it in memory.
        """
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
        """Raise UsageError for UTF-16 or UTF-32 without a byte order mark."""
        marks = _MARKS.get(self._encoding)
        if data and marks and not data.startswith(marks):
            raise UsageError(
                f"{self._name} has no byte order mark; give --encoding {self._encoding}-le, or {self._encoding}-be"
            )


def check_encoding(name: str) -> str:
    """Return Python's name of a text encoding. Raises UsageError if no text encoding has the name."""
    try:
        found = codecs.lookup(name)
        codecs.getincrementaldecoder(name)
        "a".encode(name)
    except (LookupError, ValueError):
        raise UsageError(
            f"--encoding {name}: there is no such text encoding; give utf-8, utf-16, latin-1 or cp1252"
        ) from None
    return found.name


def marked_encoding(data: bytes, encoding: str = UTF_8) -> str:
    """Return the encoding of a text.

    It is UTF-16 or UTF-32 if the text begins with a byte order mark of one of these and `encoding` is UTF-8. Otherwise
    it is `encoding`.

    Args:
        data: the first bytes of the text.
    """
    # UTF-32 comes first: its little-endian mark is UTF-16's mark and a zero character, with which no text begins.
    marked = [name for name, marks in reversed(_MARKS.items()) if data.startswith(marks)]
    return marked[0] if marked and encoding in _MARKABLE else encoding


def page_encoding(page: bytes, encoding: str = UTF_8) -> str:
    """Return the encoding of an HTML page.

    It is the first of these that exists: `encoding` if this is not UTF-8; the encoding of a byte order mark; the
    encoding that the page declares; UTF-8.
    """
    if encoding not in _MARKABLE or page.startswith(codecs.BOM_UTF8):
        return encoding
    marked = marked_encoding(page)
    return marked if marked != UTF_8 else declared_encoding(page) or encoding


def undecodable(error: UnicodeError, encoding: str, end: int) -> str:
    """Return the part of an error message that says why a text cannot be decoded.

    Args:
        end: byte offset in the text at which the data passed to the decoder ends.
    """
    said = f"is not text in {encoding.upper()}"
    if not isinstance(error, UnicodeDecodeError):
        return said
    return f"{said} at byte offset {end - len(error.object) + error.start:,}"


def decode_text(data: bytes, name: str) -> str:
    """Decode a whole text from UTF-8, or from UTF-16 or UTF-32 with a byte order mark. The mark is removed.

    Raises:
        UsageError: the bytes are not text in that encoding, or contain a zero character.
    """
    encoding = marked_encoding(data)
    try:
        text = data.decode(encoding).removeprefix("\ufeff")
    except UnicodeError as error:
        where = undecodable(error, encoding, len(data))
        raise UsageError(f"{name} {where}; convert it to UTF-8 first, for example with iconv") from None
    if "\0" in text:
        # English text in UTF-16 is valid UTF-8, too, in which a zero byte follows each letter.
        raise UsageError(
            f"{name} contains zero bytes, as UTF-16 text does; convert it to UTF-8 first, for example with iconv"
        )
    return text


def _way_out(data: bytes) -> str:
    """Return the remedy at the end of an error message: an --encoding, or conversion to plain text."""
    zeros = [data[start:1000:2].count(0) for start in (0, 1)]
    if max(zeros) > len(data[:1000]) // 4 > 2 * min(zeros):
        return f", as UTF-16 does; give --encoding utf-16-{'le' if zeros[1] > zeros[0] else 'be'}"
    if 0 in data:
        return "; convert it to plain text first"
    if found := detected_encoding(data):
        return f"; give the encoding that it seems to have, --encoding {found}, or convert it to plain text first"
    return "; give its encoding, such as --encoding latin-1, or convert it to plain text first"


@contextmanager
def open_document(source: str, *, whole: bool, encoding: str = UTF_8) -> Iterator[Document]:
    """Open the document in a file, or on standard input for `-`. The text of PDF, DOCX and HTML files is extracted.

    Args:
        whole: read the whole document now. Otherwise read only its first 2**20 characters, which mostly show whether
            it is text. A PDF, DOCX or HTML file is always read whole.
        encoding: a name of the text's encoding, such as `utf-8` or `latin-1`.

    Raises:
        UsageError: the encoding is unknown, or `open_source` refuses the source. Or the source is empty, is not text in
            the encoding, or is a PDF, DOCX or HTML file that is too large or whose text cannot be extracted.
        SparsekvError: reading failed, or extraction needs a library that is missing.
    """
    known = check_encoding(encoding)
    if (kind := extracted.kind_of(source)) is not None:
        extract = _extracted(source, kind, known)
        yield Document.of(extract.text, extract.pages)
        return
    with open_source(source) as reader:
        document = Document("standard input" if source == "-" else source, reader, known)
        if whole:
            document.whole()
        else:
            document.first(_PIECE)
        yield document


def _extracted(source: str, kind: int, encoding: str) -> extracted.PagedText:
    data = read_bytes(source, limit=extracted.MOST_BYTES + 1)
    if len(data) > extracted.MOST_BYTES:
        raise UsageError(f"{source} is larger than {extracted.MOST_BYTES >> 20} MiB; convert it to plain text first")
    if kind == extracted.HTML:
        page = Document(source, io.BytesIO(data), page_encoding(data, encoding)).whole()
        data = page.encode()
    elif not data.strip():
        raise UsageError(f"{source} is empty; give a document with text in it")
    return extracted.extracted_text(source, kind, data)


def read_document(source: str, encoding: str = UTF_8) -> str:
    """Return the text of a file, or of standard input for `-`. Raises the errors of `open_document`."""
    with open_document(source, whole=True, encoding=encoding) as document:
        return document.whole()
