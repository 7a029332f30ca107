"""What the pages of reports share: their style, and scripts for plots and heat maps."""

from collections.abc import Iterable, Mapping
from typing import Any

from sparsekv.cli.pages.page import Page
from sparsekv.runtime.selection.budget import Budget

STYLES = ("report.css",)
SCRIPTS = ("scales.js", "pointing.js", "plot.js", "heat_map.js", "report.js")


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
    return Page(f"{title} \u2013 sparsekv", data, STYLES, (*SCRIPTS, *scripts))
