"""Extract the texts of PDF, DOCX and HTML documents, in a process with limits of time and memory."""

import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from sparsekv.formats.documents import extractors
from sparsekv.formats.documents.extractors import Status
from sparsekv.formats.errors import SparsekvError, UsageError

PDF, DOCX, HTML = range(3)
"""Kinds of files: indices in `extractors.KINDS`."""
_ENDINGS = {".pdf": PDF, ".docx": DOCX, ".htm": HTML, ".html": HTML, ".xhtml": HTML}
_NAMES = ("PDF", "DOCX", "HTML")
MOST_BYTES = 64 << 20
"""Maximum size, in bytes, of a PDF or DOCX file, and of an HTML file that is the whole document."""
LEAST_SECONDS, MOST_SECONDS = 10, 120
"""Smallest and largest limit of the processor time for a file; the limit rises with the file's size. The extraction may
take twice the limit by the clock."""
_SECONDS_A_MEBIBYTE = {PDF: 20, DOCX: 20, HTML: 2}
SECONDS_IN_ALL = 600
"""Limit of the total time for all files of a document, by the clock."""

_NAMED = 5
"""Number of pages without text that a message names for each file."""

INSTALL = "pip install 'sparsekv[documents]'"
MISSING = f"in need of {INSTALL}"
DAMAGED, LOCKED, NO_TEXT = "damaged", "encrypted", "without text"
SLOW, LARGE = "too slow to extract", "too large to extract"
LATE = f"past the {SECONDS_IN_ALL // 60} minutes for extraction"
_REASONS: dict[int, str] = {
    Status.DAMAGED: DAMAGED,
    Status.LOCKED: LOCKED,
    Status.SLOW: SLOW,
    Status.LARGE: LARGE,
    Status.LONG: LARGE,
}


class NotExtractedError(Exception):
    """A file's text cannot be extracted. The message is one of the reasons above, from `MISSING` to `LATE`."""


@dataclass(frozen=True)
class PagedText:
    """A text, and the index of each page's first character. `pages` is empty for a text that is not a PDF's."""

    text: str
    pages: tuple[int, ...] = ()


def told_blank_pages(texts: Iterable[tuple[str, str, Sequence[int]]]) -> str:
    """Return a line about the pages without text; empty if there are none.

    Args:
        texts: name and text of each file, and the index of each page's first character.
    """
    parts = []
    for name, text, pages in texts:
        edges = pairwise([*pages, len(text)])
        blank = [page for page, edge in enumerate(edges, 1) if text[slice(*edge)].rstrip() == f"[Page {page}]"]
        if blank:
            some = f"{', '.join(map(str, blank[:_NAMED]))}{', ...' * (len(blank) > _NAMED)}"
            parts.append(f"{len(blank):,} of {len(pages):,} in {name} ({some})")
    return f"pages without text, as scanned pages are: {', '.join(parts)}" if parts else ""


def kind_of(path: str) -> int | None:
    """Return the kind of a file by the ending of its name; None for plain text."""
    return _ENDINGS.get(os.path.splitext(path)[1].lower())


class Extractor:
    """Extracts texts by a process that starts with the first file and ends with the context.

    All files together may take SECONDS_IN_ALL. After that, `text` refuses every file.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._left = float(SECONDS_IN_ALL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def text(self, kind: int, data: bytes) -> PagedText:
        """Return the text of a file's bytes; `kind` is a result of `kind_of`. HTML is given in UTF-8.

        Raises:
            NotExtractedError: the text cannot be extracted.
        """
        if any(find_spec(library) is None for library in extractors.LIBRARIES.get(kind, ())):
            raise NotExtractedError(MISSING)
        if self._left <= 0:
            raise NotExtractedError(LATE)
        seconds = min(LEAST_SECONDS + _SECONDS_A_MEBIBYTE[kind] * (len(data) >> 20), MOST_SECONDS)
        start = time.monotonic()
        try:
            status, text = self._ask(kind, seconds, data, start + min(2 * seconds, self._left))
        except TimeoutError:  # TimeoutError is an OSError, too
            self._end()
            raise NotExtractedError(SLOW) from None
        except (OSError, EOFError):
            self._end()
            raise NotExtractedError(DAMAGED) from None
        finally:
            self._left -= time.monotonic() - start
        if status != Status.TEXT:
            raise NotExtractedError(_REASONS.get(status, DAMAGED))
        if not text.strip():
            raise NotExtractedError(NO_TEXT)
        before, *pages = text.decode().split(extractors.PAGE)
        starts = accumulate(map(len, pages), initial=len(before))
        return PagedText("".join([before, *pages]), tuple(start for start, _ in zip(starts, pages, strict=False)))

    def _ask(self, kind: int, seconds: int, data: bytes, end: float) -> tuple[int, bytes]:
        if self._process is None:
            # -P: no module of the current folder is imported.
            command = [sys.executable, "-P", str(Path(extractors.__file__))]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, start_new_session=True, bufsize=0, **pipes)  # type: ignore[call-overload]
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        view = memoryview(extractors.REQUEST.pack(kind, seconds, len(data)) + data)
        while view:
            view = view[process.stdin.write(view) :]
        status, length = extractors.REPLY.unpack(_read(process.stdout.fileno(), extractors.REPLY.size, end))
        if length > extractors.MOST_TEXT:
            raise EOFError
        return status, _read(process.stdout.fileno(), length, end)

    def _end(self) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._process = None


def _read(descriptor: int, size: int, end: float) -> bytes:
    """Read bytes from a pipe. Raises TimeoutError at `end`, EOFError if the pipe ends."""
    data = bytearray()
    while len(data) < size:
        if not select.select([descriptor], [], [], max(end - time.monotonic(), 0))[0]:
            raise TimeoutError
        piece = os.read(descriptor, size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def extracted_text(name: str, kind: int, data: bytes) -> PagedText:
    """Return the text of a file that the user named. HTML is given in UTF-8.

    Raises:
        SparsekvError: a library is missing.
        UsageError: the text cannot be extracted.
    """
    try:
        with Extractor() as extractor:
            return extractor.text(kind, data)
    except NotExtractedError as reason:
        if str(reason) == MISSING:
            raise SparsekvError(f"{name}: reading {_NAMES[kind]} needs {INSTALL}") from None
        raise UsageError(f"{name} is {reason}; {_remedy(name, kind, str(reason))}") from None


def _remedy(name: str, kind: int, reason: str) -> str:
    if kind == PDF and reason == LOCKED:
        return f"decrypt it first, such as by qpdf --decrypt {shlex.quote(name)} decrypted.pdf"
    if kind == PDF and reason == NO_TEXT:
        return "convert it to plain text first, as scanned pages by text recognition"
    return "convert it to plain text first"
