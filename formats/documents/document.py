"""Read a document as UTF-8 text, only as far as it is needed, and refuse what is not text."""

import codecs
import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from sparsekv.formats.documents.text_source import open_source
from sparsekv.formats.errors import UsageError

_PIECE = 2**20  # bytes


class Document:
    """A text read in pieces: everything read is checked and hashed, and what `first` or `whole` returned is kept.

    A byte order mark at the start is dropped. Each method but `of` raises UsageError if what it reads is not UTF-8
    text, or if the whole text is white space.

    Args:
        name: the document's name in errors.
    """

    def __init__(self, name: str, reader: BinaryIO):
        self._name, self._reader = name, reader
        self._decoder, self._sum = codecs.getincrementaldecoder("utf-8")(), hashlib.sha256()
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
        """The sha256 of all bytes but the byte order mark, in hex; reads the rest of the text without keeping it."""
        while not self._ended:
            self._read()
        return self._sum.hexdigest()

    def _read(self) -> str:
        data = self._reader.read(_PIECE)
        self._ended = not data
        if not self._begun:
            data, self._begun = data.removeprefix(codecs.BOM_UTF8), True
        try:
            text = self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError:
            raise UsageError(f"{self._name} is not text in UTF-8; convert it to plain text first") from None
        if "\0" in text:
            raise UsageError(f"{self._name} is not text: it contains zero bytes; convert it to plain text first")
        self._sum.update(data)
        self._blank = self._blank and not text.strip()
        if self._ended and self._blank:
            raise UsageError(f"{self._name} is empty; give a document with text in it")
        return text


@contextmanager
def open_document(source: str, *, whole: bool) -> Iterator[Document]:
    """A document in a file, or on standard input for `-`.

    Args:
        whole: read all of it now; otherwise only its first MiB, which mostly suffices to find that it is not text.

    Raises:
        UsageError: no such file, a folder, one that may not be read, empty, or not UTF-8 text.
        SparsekvError: reading it failed.
    """
    with open_source(source) as reader:
        document = Document("standard input" if source == "-" else source, reader)
        if whole:
            document.whole()
        else:
            document.first(_PIECE)
        yield document


def read_document(source: str) -> str:
    """Text of a file, or of standard input for `-`; raises what `open_document` raises."""
    with open_document(source, whole=True) as document:
        return document.whole()
