"""Write self-contained HTML pages with data, style and script in one file, and define the option `--html`."""

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
from sparsekv.cli.common.options import refuse_impossible_name
from sparsekv.cli.common.streams import json_text, printable
from sparsekv.formats.errors import SparsekvError, UsageError, reason_of
from sparsekv.formats.index.folder import sync_path
from sparsekv.runtime.selection.interface import Budget

DIGITS, DECADES = 4, 7
ONE, NONE, OTHER = 63_001, 65_534, 65_535
"""Codes of `share_column` for the value 1, for None, and for a value that is stored separately. Code 0 stands for the
value 0. Codes 1 to 63,000 stand for 1e-7 to 0.9999 with four significant digits."""


def whole_column(values: Sequence[int]) -> dict[str, str]:
    """Encode whole numbers from 0 to 2 ** 32 - 1 in base64, little-endian. The largest number determines the bytes of
    each number: 1, 2 or 4."""
    array = np.asarray(values, np.int64)
    size = next(size for size in (1, 2, 4) if array.max(initial=0) < 1 << 8 * size)
    return {"type": f"u{size}", "data": _base64(array.astype(f"<u{size}"))}


def share_column(values: Sequence[float | None]) -> dict[str, str]:
    """Encode shares in base64 without loss.

    Each value has a code of two bytes. 0, 1, None and shares of at least 1e-7 with up to four significant digits have
    codes of their own. Other shares have one common code, and are appended as float64, in their order.
    """
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
"""The beginning of every page. A file that begins like this may be overwritten."""
STYLES = ("common.css",)
SCRIPTS = ("dom.js", "numbers.js", "table.js", "theme.js")
"""Scripts of every page. A page's own scripts come after them."""


@dataclass(frozen=True)
class Page:
    """An HTML page. Its script reads the data with `pageData()` and builds the visible content."""

    title: str
    data: Any
    """Any value that JSON can represent."""
    styles: tuple[str, ...]
    """Names of files in `assets/`, in order; they come after `STYLES`."""
    scripts: tuple[str, ...]
    """Names of files in `assets/`, in order; they come after `SCRIPTS` and share one scope."""


def page_html(page: Page) -> str:
    """Render the HTML of a page. The content security policy of the page allows only the page's own script and style.

    Each `<` in the data is escaped, so that no text in the data can end the script element.
    """
    style, script = (
        _joined(STYLES + page.styles),
        f'"use strict";\n(() => {{\n{_joined(SCRIPTS + page.scripts)}}})();\n',
    )
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    title = escape(printable(" ".join(page.title.split())))
    return (
        f'{START}<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="referrer" content="no-referrer">\n<title>{title}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n"
        "<noscript>This page shows its data with JavaScript, which is switched off here.</noscript>\n"
        f'<script type="application/json" id="data">{_embedded(page.data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def write_page(page: Page, path: Path, option: str) -> int:
    """Write a page and return its size in bytes. The file is written whole or not at all.

    `option` is the option that errors name, such as `--html`.

    Raises:
        UsageError: the file name is not valid, or its folder is missing.
        SparsekvError: a file exists that is no page of sparsekv, or the page cannot be written.
    """
    refuse_unwritable_page(path, option)
    return replace_file(path, page_html(page), option, "page")


def refuse_unwritable_page(path: Path | None, option: str) -> None:
    """Check, before anything is measured, that `path`, if there is one, is a valid name for a page.

    Raises the errors of `write_page`, except for a failed write.
    """
    if path is not None:
        refuse_impossible_name(path, option)
        refuse_other_file(path, option)


def refuse_other_file(path: Path, option: str, what: str = "page", begins: str = START) -> None:
    """Raise SparsekvError if a file exists at the path that does not begin with `begins`. An empty file is accepted."""
    if os.path.lexists(path) and not _is_ours(path, begins):
        raise SparsekvError(f"{path} exists and is not a {what} of sparsekv; give {option} another name")


def _is_ours(path: Path, begins: str) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(begins)) in (begins.encode(), b"")
    except OSError:
        return False


def replace_file(path: Path, text: str, option: str, what: str) -> int:
    """Replace a file atomically, and return its size in bytes.

    A hidden temporary file is written in the same folder and renamed. If the path is a link, its target is replaced.

    Raises:
        SparsekvError: the file cannot be written; the old file stays.
    """
    data = text.encode()
    try:
        _replace(path.resolve(), data)
    except OSError as error:
        raise SparsekvError(f"cannot write the {what} {path}: {reason_of(error)}; give {option} another name") from None
    return len(data)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.parent / f".sparsekv-{token_hex(8)}{path.suffix}"
    try:
        with temporary.open("xb") as file:
            file.write(data)
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
    """Return the hash, without quotes, by which a content security policy allows an element with exactly this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _embedded(data: Any) -> str:
    """Return the data as JSON without `<`, so that the text contains no end tag and no comment."""
    return json_text(data).replace("<", "\\u003c")


ENDINGS = (".html", ".htm")
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE.html",
        help=(
            "Also write the report as one HTML file with sortable tables and interactive plots. The file "
            "loads nothing from the network."
        ),
    ),
]


def refuse_unwritable_html(path: Path | None) -> None:
    """Check, before anything is measured, that the page can be written.

    Raises:
        UsageError: the file name has another ending or is not valid, or its folder is missing.
        SparsekvError: a file exists that is no page of sparsekv.
    """
    refuse_unwritable_page(path, "--html")
    if path is not None and path.suffix.lower() not in ENDINGS:
        raise UsageError(f"--html {path}: the name of a page ends in .html; give {path.with_suffix('.html')}")


def write_html(page: Page, path: Path, *, quiet: bool) -> None:
    """Write the page and note its name. Raises the errors of `write_page`."""
    write_page(page, path, "--html")
    note(f"page: {path}", quiet=quiet)


REPORT_STYLES = ("report.css",)
REPORT_SCRIPTS = ("scales.js", "pointing.js", "plot.js", "heat_map.js", "report.js")


def budget_texts(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the budget of each row as text; empty for no budget.

    JavaScript could not distinguish the numbers 1 (one token) and 1.0 (a share).
    """
    return [budget_text(row["budget"]) for row in rows]


def budget_text(budget: float | int | None) -> str:
    """Return a share in percent, or a number of tokens, as text; empty for None."""
    if budget is None:
        return ""
    return str(Budget(budget)) if isinstance(budget, float) else f"{budget:,}"


def report_page(title: str, data: Any, *scripts: str) -> Page:
    """Return the page of a report. The given scripts build its content from the data."""
    return Page(f"{title} \u2013 sparsekv", data, REPORT_STYLES, (*REPORT_SCRIPTS, *scripts))
