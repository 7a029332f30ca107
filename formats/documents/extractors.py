"""Extract the text of one PDF, DOCX or HTML file in a process of its own. `extracted.py` runs this file as a program.

The program forks for each file, so no file changes how the next one is read. The fork has limits on its memory, its
processor time and its output. It opens no file but Python's own modules, and no connection.

A request on standard input is a kind of `KINDS`, a limit of processor time in seconds, the number of bytes, and the
bytes. A reply on standard output is a status, the number of bytes, and the text in UTF-8. `PAGE` is before each page.
"""

import io
import os
import re
import resource
import signal
import struct
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from html.parser import HTMLParser
from importlib import import_module
from typing import Any, BinaryIO

from sparsekv.formats.documents.docx_parts import in_letters, in_roman, numbers_shown, prepared

REQUEST, REPLY = struct.Struct(">BIQ"), struct.Struct(">BQ")
PAGE = "\f"
"""Character before each page of a text that has pages, and nowhere else in a text."""
MOST_MEMORY = 1 << 30
"""Maximum size of a fork's address space, in bytes."""
MOST_TEXT = 8 << 20
"""Maximum size of a file's text, in bytes."""
MOST_XML = 64 << 20
"""Maximum size of the unpacked parts of a DOCX file that are read, in bytes."""


class Status(IntEnum):
    """First number of a reply: whether a file's text follows, or why it does not."""

    TEXT = 0
    """The file's text follows."""
    DAMAGED = 1
    """The file is damaged, or is of another kind."""
    LOCKED = 2
    """The file is encrypted."""
    SLOW = 3
    """The extraction takes too much processor time."""
    LARGE = 4
    """The extraction takes too much memory."""
    LONG = 5
    """The file has too much text, or too large parts."""


class LockedError(Exception):
    """A file is encrypted."""


class LongError(Exception):
    """A file has more than MOST_TEXT bytes of text, or parts of more than MOST_XML bytes."""


def pdf_text(data: bytes) -> str:
    """Return the text of a PDF file's pages, each after `PAGE` and a line `[Page N]`; empty if no page has text.

    Raises LockedError, LongError, or any error of pypdf for a damaged file.
    """
    from pypdf import PdfReader

    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise LockedError
    pages, length = list[str](), 0
    for page in reader.pages:
        pages.append(tidied(page.extract_text().strip()))
        length += len(pages[-1]) + len("[Page ]\n\n\n")
        if length > MOST_TEXT:
            raise LongError
    marked = (f"{PAGE}[Page {number}]\n{text}".rstrip("\n") for number, text in enumerate(pages, 1))
    return "\n\n".join(marked) if any(pages) else ""


def docx_text(data: bytes) -> str:
    """Return the text of a DOCX file: paragraphs, headings, lists, tables and notes.

    Raises LockedError, LongError, ValueError for a document type declaration, or any error of mammoth for a damaged
    file.
    """
    import mammoth

    if data.startswith(b"\xd0\xcf\x11\xe0"):  # the container that encrypts Office files
        raise LockedError
    with zipfile.ZipFile(io.BytesIO(data)) as parts:
        unpacked = 0
        for part in parts.infolist():
            if not part.filename.endswith((".xml", ".rels")):
                continue
            unpacked += part.file_size  # zipfile reads no more than this size, whatever the real size is
            if unpacked > MOST_XML:
                raise LongError
            if b"<!DOCTYPE" in parts.read(part).replace(b"\0", b""):
                raise ValueError("a DOCX file has no document types, with which entities could be declared")
        file = prepared(parts)
    pictures = mammoth.images.img_element(lambda image: {})
    page = mammoth.convert_to_html(
        file,
        style_map="p[style-name='Title'] => h1:fresh\nbr[type='page'] => br\nbr[type='column'] => br",
        include_embedded_style_map=False,  # the file's own style map could leave out text
        convert_image=pictures,
        external_file_access=False,
    )
    # HTML would show spaces at the beginning of a paragraph or line as none, and they indent code.
    indented = _SPACES_AT_BEGINNING.sub(lambda found: "\xa0" * len(found[0]), page.value)
    return tidied(numbers_shown(html_text(indented)))


def html_text(page: str, *, navigation: bool = False) -> str:
    """Return the text of an HTML page: headings with #, lists with - or numbers, cells of tables with | between them.

    A cell that spans several columns or rows is followed by empty cells in its place. Checked boxes are [x] and others
    [ ], and struck text is between two ~~. In MathML, fractions have a / between their parts, and _ or ^ is before an
    index or exponent. Scripts and styles are left out, and pictures except for their alternative text. Navigation is
    left out unless it is more than half of the text.

    Args:
        navigation: whether to keep navigation in any case.
    """
    renderer = _Renderer(navigation=navigation)
    renderer.feed(page)
    renderer.close()
    text = "".join(renderer.pieces)
    if renderer.navigation > len(text):
        return html_text(page, navigation=True)
    return text


_SPACES = " \t\r\n\f"
_SPACES_AT_BEGINNING = re.compile("(?<=>)  +")
# A no-break space is part of a word, so that it is kept: some pages indent code by no-break spaces.
_WORD = re.compile(f"[^{_SPACES}]+")
_BLOCKS = frozenset(
    {
        "address",
        "article",
        "aside",
        "blockquote",
        "body",
        "caption",
        "center",
        "details",
        "dialog",
        "div",
        "dl",
        "dt",
        "dd",
        "fieldset",
        "figcaption",
        "figure",
        "footer",
        "form",
        "header",
        "hgroup",
        "html",
        "legend",
        "main",
        "nav",
        "optgroup",
        "option",
        "section",
        "summary",
        "textarea",
    }
)
_PARAGRAPHS = frozenset({"p", "pre", "table", "title", "hr", "blockquote", "dl", "figure"})
_HEADINGS = {f"h{level}": f"{'#' * level} " for level in range(1, 7)}
_DROPPED = frozenset({"script", "style", "template", "noscript", "svg", "nav", "annotation", "annotation-xml"})
_STRUCK = frozenset({"s", "del", "strike"})
_BETWEEN = {
    "mfrac": ("/",),
    "msub": ("_",),
    "munder": ("_",),
    "msup": ("^",),
    "mover": ("^",),
    "msubsup": ("_", "^"),
    "munderover": ("_", "^"),
    "mroot": (" root ",),
}
"""Texts between the children of an element of MathML."""
_TOKENS = frozenset({"mi", "mn", "mo", "ms", "mtext"})
"""Elements of MathML that need no parentheses around them."""
_MOST_COLUMNS = 1000
"""Maximum number of columns and of rows that a cell spans, as in browsers for columns."""


@dataclass(frozen=True)
class _List:
    """The next number of an ordered list, the step to the number after it, and the style: 1, a, A, i or I."""

    number: int
    step: int = 1
    style: str = "1"

    @classmethod
    def of(cls, attributes: dict[str, str | None]) -> "_List | None":
        """Return the state of a new `ol` list from its attributes.

        Returns None if the list counts down to its last item, because its first number is then not known.
        """
        start, down = _number(attributes.get("start")), "reversed" in attributes
        if start is None and down:
            return None
        return cls(1 if start is None else start, -1 if down else 1, attributes.get("type") or "1")

    @property
    def label(self) -> str:
        """The next number as the page shows it."""
        return ordinal(self.number, self.style)


@dataclass
class _MathElement:
    """An open element of MathML, the text at its end, and the number of its children so far."""

    tag: str
    after: str = ""
    children: int = 0


@dataclass
class _Table:
    """Position in an HTML table that has begun and not yet ended.

    Attributes:
        column: the first column behind the cells so far in the row.
        last: the column of the last cell in the row; None for a row without cells.
        spans: number of rows, from this row on, that a cell of several rows spans, by column.
    """

    column: int = 0
    last: int | None = None
    spans: dict[int, int] = field(default_factory=dict)

    def row(self) -> None:
        """Begin a row."""
        self.spans = {column: rows - 1 for column, rows in self.spans.items() if rows > 1}
        self.column, self.last = 0, None

    def cell(self, attributes: dict[str, str | None]) -> int:
        """Begin a cell. Returns the number of column borders since the last cell of the row or the row's beginning."""
        while self.column in self.spans:
            self.column += 1
        borders, self.last = self.column - (self.last or 0), self.column
        columns, rows = (min(_number(attributes.get(name)) or 1, _MOST_COLUMNS) for name in ("colspan", "rowspan"))
        for column in range(self.column, self.column + columns if rows > 1 else 0):
            self.spans[column] = max(rows, self.spans.get(column, 0))
        self.column += max(columns, 1)
        return borders

    def copy(self) -> "_Table":
        """Return an independent copy."""
        return replace(self, spans={**self.spans})


class _Renderer(HTMLParser):
    """Renders a page to `pieces` of text.

    With the argument `navigation`, navigation is kept. The attribute `navigation` is the number of characters of
    navigation that were left out.

    If an element is left out, its text is rendered first and removed at the element's end. So no text is lost if the
    page is cut or wrong and the element has no end.
    """

    def __init__(self, *, navigation: bool):
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.navigation = 0
        self._dropped = _DROPPED - {"nav"} if navigation else _DROPPED
        self._gap, self._space = 0, False
        self._fresh = True  # right after a marker of a heading, a list or a cell, where no line break is written
        self._preformatted = 0
        self._lists: list[_List | None] = []  # the open lists; None: without numbers
        self._tables: list[_Table] = []  # the open tables
        self._math: list[_MathElement] = []  # the open elements of MathML
        self._struck = 0  # number of open elements of struck text
        self._unmarked = 0  # number of them whose text has not begun
        self._inside: tuple[str, int, Any] | None = None  # the element left out: tag, depth, earlier state

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._inside is not None:
            if tag == self._inside[0]:
                self._inside = tag, self._inside[1] + 1, self._inside[2]
        elif tag in self._dropped:
            tables = [table.copy() for table in self._tables]
            spaces = self._gap, self._space, self._fresh, self._preformatted
            self._inside = tag, 1, (len(self.pieces), spaces, (self._struck, self._unmarked, [*self._lists], tables))
        elif tag == "math" or self._math:
            self._enter_math(tag)
        if tag == "br":
            self._gap = self._gap if self._fresh else min(self._gap + 1, 2)
        elif tag in _HEADINGS:
            self._break(2)
            self._mark(_HEADINGS[tag])
        elif tag in ("ul", "ol", "menu"):
            self._break(1 if self._lists else 2)
            self._lists.append(_List.of(dict(attrs)) if tag == "ol" else None)
        elif tag == "li":
            self._break(1)
            self._mark(self._bullet(_number(dict(attrs).get("value"))))
        elif tag in ("td", "th"):
            self._cell(dict(attrs))
        elif tag in ("sup", "sub"):
            self._flush()
            self.pieces.append("^" if tag == "sup" else "_")
            self._space = False
        elif tag == "img":
            self.handle_data(dict(attrs).get("alt") or "")
        elif tag == "input" and (dict(attrs).get("type") or "").lower() in ("checkbox", "radio"):
            self.handle_data("[x] " if "checked" in dict(attrs) else "[ ] ")
        elif tag in _STRUCK:
            self._struck, self._unmarked = self._struck + 1, self._unmarked + 1
        else:
            self._enter(tag)

    def _enter_math(self, tag: str) -> None:
        if tag in _BLOCKS or tag in _PARAGRAPHS or tag in _HEADINGS or tag in ("li", "tr", "td", "th"):
            self._math = []  # the formula has no end
            return
        above = self._math[-1] if self._math else _MathElement("")
        between = _BETWEEN.get(above.tag, ())
        before = between[above.children - 1] if 0 < above.children <= len(between) else ""
        above.children += 1
        grouped = bool(between) and tag not in _TOKENS
        before += "(" * grouped + "sqrt(" * (tag == "msqrt")
        self._math.append(_MathElement(tag, ")" * (grouped + (tag == "msqrt"))))
        if before:
            self._flush()
            self.pieces.append(before)

    def _leave_math(self, tag: str) -> None:
        if all(tag != one.tag for one in self._math):
            return
        left = ""
        while left != tag:
            element = self._math.pop()
            self.pieces.append(element.after)
            left = element.tag

    def _enter(self, tag: str) -> None:
        if tag in _PARAGRAPHS or tag in _BLOCKS or tag == "tr":
            self._break(2 if tag in _PARAGRAPHS else 1)
        if tag == "table":
            self._tables.append(_Table())
        elif tag in ("thead", "tbody", "tfoot") and self._tables:
            self._tables[-1].spans = {}  # a cell ends with its group of rows
        elif tag == "tr" and self._tables:
            self._gap = self._gap if self._tables[-1].last is None else 1  # no blank line between two rows
            self._tables[-1].row()
        elif tag == "pre":
            self._preformatted += 1

    def handle_endtag(self, tag: str) -> None:
        if self._inside is None and self._math:
            self._leave_math(tag)
        if tag in _HEADINGS or tag in _PARAGRAPHS or tag in ("ul", "ol", "menu"):
            self._fresh = False
            nested = tag in ("ul", "ol", "menu") and len(self._lists) > 1
            self._break(1 if nested else 2)
        elif tag in _BLOCKS or tag in ("li", "tr"):
            self._fresh = self._fresh and tag not in ("li", "tr")
            self._break(1)
        if tag in ("ul", "ol", "menu") and self._lists:
            self._lists.pop()
        elif tag == "table" and self._tables:
            self._tables.pop()
        elif tag == "pre":
            self._preformatted = max(self._preformatted - 1, 0)
        elif tag in _STRUCK and self._struck:
            self._struck -= 1
            if self._unmarked:
                self._unmarked -= 1
            else:
                self.pieces.append("~~")
                self._fresh = False
        if self._inside is not None and tag == self._inside[0]:
            self._leave(*self._inside)

    def _leave(self, tag: str, depth: int, state: Any) -> None:
        if depth > 1:
            self._inside = tag, depth - 1, state
            return
        start, spaces, elements = state
        self._gap, self._space, self._fresh, self._preformatted = spaces
        self._struck, self._unmarked, self._lists, self._tables = elements
        if tag == "nav":
            self.navigation += sum(map(len, self.pieces[start:]))
        del self.pieces[start:]
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._preformatted:
            self._space = False
            self._flush()
            self.pieces.append(data)
            return
        words = _WORD.findall(data)
        if not words:
            self._space = self._space or (bool(data) and not self._math)
            return
        self._space = self._space or data[0] in _SPACES
        self._flush()
        self.pieces.append(" ".join(words).replace("\xa0", " "))
        self._space = data[-1] in _SPACES

    def unknown_decl(self, data: str) -> None:
        """Add the text of a CDATA section, which XHTML may have. Other declarations have no text."""
        if data.startswith("CDATA["):
            self.handle_data(data.removeprefix("CDATA["))

    def _flush(self) -> None:
        """Write what stands before the next text: line breaks or a space, and then the beginning of struck text."""
        self._separate()
        self.pieces.append("~~" * self._unmarked)
        self._unmarked = 0

    def _separate(self) -> None:
        """Write the line breaks or the space before the next text or marker."""
        if self._gap:
            self.pieces.append("\n" * self._gap)
        elif self._space and not self._fresh:
            self.pieces.append(" ")
        self._gap, self._space, self._fresh = 0, False, False

    def _break(self, lines: int) -> None:
        if not self._fresh:
            self._gap = max(self._gap, lines)

    def _mark(self, marker: str) -> None:
        self._space = False
        self._separate()
        self.pieces.append(marker)
        self._fresh = True

    def _bullet(self, value: int | None) -> str:
        """Return the marker of the next item; `value` is the number that the item itself sets."""
        indent = "  " * min(len(self._lists) - 1, 20)
        this = self._lists[-1] if self._lists else None
        if this is None:
            return f"{indent}- "
        if value is not None:
            this = replace(this, number=value)
        self._lists[-1] = replace(this, number=this.number + this.step)
        return f"{indent}{this.label}. "

    def _cell(self, attributes: dict[str, str | None]) -> None:
        if not self._tables:
            self._break(1)
            return
        table = self._tables[-1]
        first = table.last is None
        borders = table.cell(attributes)
        if first and not self._fresh:
            self._break(1)
            self._mark("")
        for _ in range(borders):
            self._gap = 0
            self._mark(" | ")


def _number(value: str | None) -> int | None:
    """Return the whole number in an attribute's value; None if there is none."""
    found = re.match(r"\s*([+-]?[0-9]{1,9})(?![0-9])", value or "")
    return None if found is None else int(found[1])


def ordinal(number: int, style: str) -> str:
    """Return a number of a list in a style of HTML: 1, a, A, i or I.

    The number is decimal in any other style, and if the style has no form for it.
    """
    forms = {"a": in_letters, "i": in_roman}
    text = forms.get(style.lower(), str)(number) or str(number)
    return text.upper() if style.isupper() else text


def tidied(text: str) -> str:
    """Return a text with only newlines as line ends, without control characters and without white space at line ends.

    Tabs are kept. Several blank lines in a row become one.
    """
    text = re.sub("\r\n?|[\v\f\x1c-\x1e\x85]", "\n", text)
    text = re.sub("[\0-\x08\x0e-\x1f\x7f-\x9f\ufffe\uffff]", "", text)
    lines = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub("\n{3,}", "\n\n", lines).strip("\n")


LIBRARIES = {0: ("pypdf",), 1: ("mammoth",)}
KINDS: tuple[Callable[[bytes], str], ...] = (
    pdf_text,
    docx_text,
    lambda data: tidied(html_text(data.decode())),
)


def limit(seconds: int) -> None:
    """Limit this process to `seconds` of processor time and MOST_MEMORY bytes of memory, and forbid writing to files.

    Opening files, connections and processes raises PermissionError, except to read Python's own modules.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    modules = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in sys.path if os.path.isdir(folder))

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            path, mode = arguments[0], arguments[1] if event == "open" else "r"
            reads = not isinstance(path, int) and f"{os.path.realpath(os.fsdecode(path))}{os.sep}".startswith(modules)
            if reads and mode in (None, "r", "rb"):
                return
        elif event.partition(".")[0] not in _CLOSED:
            return
        raise PermissionError(event)

    sys.addaudithook(refuse)


_CLOSED = frozenset({"os", "socket", "subprocess", "shutil", "tempfile", "ctypes", "urllib", "http", "ftplib", "mmap"})
"""First words of the audit events that a fork refuses."""


def _extract(kind: int, seconds: int, data: bytes) -> tuple[Status, bytes]:
    try:
        limit(seconds)
        text = KINDS[kind](data).encode("utf-8", "replace")
        return (Status.TEXT, text) if len(text) <= MOST_TEXT else (Status.LONG, b"")
    except LockedError:
        return Status.LOCKED, b""
    except LongError:
        return Status.LONG, b""
    except MemoryError:
        return Status.LARGE, b""
    except Exception as error:  # a parser may raise anything from a stranger's file
        # An encrypted PDF whose cipher needs another library raises an error only here, when pages are read.
        locked = "encrypt" in type(error).__name__.lower() or "cryptography" in str(error)
        return Status.LOCKED if locked else Status.DAMAGED, b""


def _answer(request: tuple[int, int, bytes]) -> tuple[int, bytes]:
    """Extract a file's text in a fork."""
    reading, writing = os.pipe()
    fork = os.fork()
    if fork == 0:
        os.close(reading)
        try:
            with open(writing, "wb") as pipe:  # opened before `_extract` sets its limits
                status, text = _extract(*request)
                pipe.write(bytes([status]) + text)
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read(MOST_TEXT + 2)
    ended = os.waitpid(fork, 0)[1]
    if answer and len(answer) <= MOST_TEXT + 1 and not os.WIFSIGNALED(ended):
        return answer[0], answer[1:]
    killed = os.WTERMSIG(ended) if os.WIFSIGNALED(ended) else None
    if killed == signal.SIGXCPU:
        return Status.SLOW, b""
    # When memory runs out, the system kills the fork.
    return Status.LARGE if killed == signal.SIGKILL else Status.DAMAGED, b""


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until the end of `requests`."""
    while len(head := requests.read(REQUEST.size)) == REQUEST.size:
        kind, seconds, length = REQUEST.unpack(head)
        for library in LIBRARIES.get(kind, ()):  # imported before the fork, and so only once
            import_module(library)
        status, text = _answer((kind, seconds, requests.read(length)))
        replies.write(REPLY.pack(status, len(text)) + text)
        replies.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
