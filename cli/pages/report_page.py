"""What the pages of reports share: their style, and scripts for plots and heat maps."""

from typing import Any

from sparsekv.cli.pages.page import Page

STYLES = ("report.css",)
SCRIPTS = ("scales.js", "pointing.js", "plot.js", "heat_map.js", "report.js")


def report_page(title: str, data: Any, *scripts: str) -> Page:
    """The page of a report, built from its data by scripts of its own."""
    return Page(f"{title} \u2013 sparsekv", data, STYLES, (*SCRIPTS, *scripts))
