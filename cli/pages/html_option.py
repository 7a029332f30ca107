"""The option `--html` of commands that report: a page beside what they print."""

from pathlib import Path
from typing import Annotated

import typer

from sparsekv.cli.common.console import note
from sparsekv.cli.pages.page import Page, refuse_unwritable_page, write_page
from sparsekv.formats.errors import UsageError

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
