"""The page of an evaluation: its tables, scores against what is read, and needles by length and depth."""

from typing import Any

from sparsekv.cli.pages.page import Page
from sparsekv.cli.pages.report_page import budget_texts, report_page


def evaluation_page(record: dict[str, Any]) -> Page:
    """The page of what `eval --json` prints."""
    texts = {name: budget_texts(record[name]) for name in ("rows", "depths")}
    return report_page(f"Evaluation on {record['document']}", record | {"budgets": texts}, "eval_page.js")
