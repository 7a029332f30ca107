"""Self-contained HTML pages: data, style and script in one file, and the option `--html`."""

import base64
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from sparsekv.cli.common.console import note
from sparsekv.cli.common.streams import json_text, printable
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.index.folder import sync_path
from sparsekv.runtime.selection.interface import Budget

DIGITS, DECADES = 4, 7
ONE, NONE, OTHER = 63_001, 65_534, 65_535
"""Codes beside that of 0, which is 0, and of 1e-7 to 0.9999 with four significant digits, which are 1 to 63,000."""


def whole_column(values: Sequence[int]) -> dict[str, str]:
    """Whole numbers from 0 in as many bytes each as the largest needs: 1, 2 or 4, little-endian."""
    array = np.asarray(values, np.int64)
    size = next(size for size in (1, 2, 4) if array.max(initial=0) < 1 << 8 * size)
    return {"type": f"u{size}", "data": _base64(array.astype(f"<u{size}"))}


def share_column(values: Sequence[float | None]) -> dict[str, str]:
    """Shares in two bytes each where they are rounded to four digits; others as float64 aside, in order; None stays."""
    array = np.asarray([np.nan if value is None else value for value in values], np.float64)
    codes = np.where(np.isnan(array), NONE, OTHER).astype("<u2")
    for decade in range(DECADES):
        scale = 10.0 ** (DIGITS + decade)
        digits = np.rint(array * scale)
        same = (digits / scale == array) & (digits >= 1000) & (digits < 10_000)
        codes[same] = 1 + 9000 * decade + digits[same].astype(int) - 1000
    codes[array == 0], codes[array == 1] = 0, ONE
    return {"type": "share", "data": _base64(codes), "others": _base64(array[codes == OTHER].astype("<f8"))}


def _base64(array: NDArray[np.generic]) -> str:
    return base64.b64encode(array.tobytes()).decode()


ASSETS = Path(__file__).parent / "assets"
START = "<!DOCTYPE html>\n<!-- a page of sparsekv -->\n"
"""The beginning of every page; a file that begins so may be overwritten."""
STYLES = ("common.css",)
SCRIPTS = ("dom.js", "numbers.js", "table.js", "theme.js")
"""Scripts of every page; a page's own scripts follow them."""


@dataclass(frozen=True)
class Page:
    """A page: its script reads the data with `pageData()` and builds what is seen."""

    title: str
    data: Any
    """Anything that JSON can say."""
    styles: tuple[str, ...]
    """Names of files in `assets/`, in order, behind `STYLES`."""
    scripts: tuple[str, ...]
    """Names of files in `assets/`, in order, behind `SCRIPTS`; they share one scope."""


def page_html(page: Page) -> str:
    """The whole HTML of a page; its policy lets nothing run or load but its own script and style.

    Text of the data cannot end its element: every `<` in it is escaped.
    """
    style, script = (
        _joined(STYLES + page.styles),
        f'"use strict";\n(() => {{\n{_joined(SCRIPTS + page.scripts)}}})();\n',
    )
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    return (
        f'{START}<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="referrer" content="no-referrer">\n<title>{_title(page.title)}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n"
        "<noscript>This page shows its data with JavaScript, which is switched off here.</noscript>\n"
        f'<script type="application/json" id="data">{_embedded(page.data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def write_page(page: Page, path: Path, option: str) -> int:
    """Write a page and give its size in bytes; a file is there whole or not at all.

    `option` is named by errors, as in `--html`.

    Raises:
        UsageError: the name is not possible, or its folder missing.
        SparsekvError: the file is there and no page of ours, or cannot be written.
    """
    refuse_unwritable_page(path, option)
    text = page_html(page).encode()
    try:
        replace_file(path, text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SparsekvError(f"cannot write the page {path}: {reason}; give {option} another name") from None
    return len(text)


def refuse_unwritable_page(path: Path | None, option: str) -> None:
    """Check, before anything is measured, that a page can be written there; what it raises is as for `write_page`."""
    if path is not None:
        refuse_impossible_name(path, option)
        refuse_other_file(path, option)


def refuse_impossible_name(path: Path, option: str) -> None:
    """Raise UsageError for a folder, a name that is too long, or one in a folder that is missing."""
    if not os.path.isdir(path.absolute().parent):
        raise UsageError(f"{option} {path}: its folder does not exist; make it first")
    if os.path.isdir(path):
        raise UsageError(f"{option} {path} is a folder; give the name of a file in it")
    if len(os.fsencode(path.name)) > os.pathconf(path.absolute().parent, "PC_NAME_MAX"):
        raise UsageError(f"{option} {path}: the name is too long; give a shorter one")


def refuse_other_file(path: Path, option: str, what: str = "page", begins: str = START) -> None:
    """Raise SparsekvError where something lies that does not begin as what is written there does."""
    if os.path.lexists(path) and not _is_ours(path, begins):
        raise SparsekvError(f"{path} is there and no {what} of sparsekv; give {option} another name")


def _is_ours(path: Path, begins: str) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(begins)) in (begins.encode(), b"")
    except OSError:
        return False


def replace_file(path: Path, text: bytes) -> None:
    """A hidden file beside it, with the permissions of a new file, takes its place; where a link goes, not the link's.

    Raises:
        OSError: it cannot be written; what was there still is.
    """
    path = path.resolve()
    temporary = path.parent / f".sparsekv-{token_hex(8)}{path.suffix}"
    try:
        with temporary.open("xb") as file:
            file.write(text)
        sync_path(temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_path(path.parent)


def _joined(names: tuple[str, ...]) -> str:
    return "".join((ASSETS / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    """A source expression of a content-security-policy: the element with exactly this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _title(text: str) -> str:
    return escape(printable(" ".join(text.split())))


def _embedded(data: Any) -> str:
    """JSON without `<`, so that neither an end tag nor a comment begins in it."""
    return json_text(data).replace("<", "\\u003c")


ENDINGS = (".html", ".htm")
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE.html",
        help="Write the report as one HTML file too, with tables to sort and plots to point at; it loads nothing.",
    ),
]


def refuse_unwritable_html(path: Path | None) -> None:
    """Check, before anything is measured, that the page can be written.

    Raises:
        UsageError: the name has another ending or is not possible, or its folder is missing.
        SparsekvError: the file is there and no page of ours.
    """
    if path is not None and path.suffix.lower() not in ENDINGS:
        raise UsageError(f"--html {path}: no page ends like this; call it {path.with_suffix('.html')}")
    refuse_unwritable_page(path, "--html")


def write_html(page: Page, path: Path, *, quiet: bool) -> None:
    """Write the page and note its name; raises what `refuse_unwritable_html` raises."""
    write_page(page, path, "--html")
    note(f"page: {path}", quiet=quiet)


REPORT_STYLES = ("report.css",)
REPORT_SCRIPTS = ("scales.js", "pointing.js", "plot.js", "heat_map.js", "report.js")


def budget_texts(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The budget of each row as text, empty for none: in JavaScript 1 token and a share of 1.0 are the same number."""
    return [budget_text(row["budget"]) for row in rows]


def budget_text(budget: float | int | None) -> str:
    """A share in percent, or a number of tokens."""
    if budget is None:
        return ""
    return str(Budget(budget)) if isinstance(budget, float) else f"{budget:,}"


def report_page(title: str, data: Any, *scripts: str) -> Page:
    """The page of a report, built from its data by scripts of its own."""
    return Page(f"{title} \u2013 sparsekv", data, REPORT_STYLES, (*REPORT_SCRIPTS, *scripts))
