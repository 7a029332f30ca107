"""The page of a recall report: its table, plots of error and recall, and every layer and head."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsekv.cli.pages.page import Page
from sparsekv.cli.pages.report_page import budget_text, budget_texts, report_page
from sparsekv.cli.reporting.output import report_record
from sparsekv.formats.hints import command
from sparsekv.runtime.reporting.front import in_order
from sparsekv.runtime.reporting.report import RecallReport, RecallRow
from sparsekv.runtime.selection.budget import Budget

MAPPED = ("recall", "output_error")
"""Measures that are drawn by layer and head."""


def recall_page(report: RecallReport, within: float, answers: str) -> Page:
    """The page; its rows are those of --json over all layers and heads, in the table's order.

    Args:
        answers: how right answers are measured, a sentence.
    """
    rows = in_order(report.by())
    question = command("trace", "--index", report.index, "What is this about?").strip("`")
    data = report_record(report, rows, within) | {"maps": _maps(report, rows), "answers": answers, "trace": question}
    best = data["best"]
    data["budgets"] = {"rows": budget_texts(data["rows"]), "best": "" if best is None else budget_text(best["budget"])}
    return report_page(f"Recall report of {Path(report.index).name}", data, "recall_page.js")


def _maps(report: RecallReport, rows: Sequence[RecallRow]) -> dict[str, Any]:
    """Layers, KV heads, and for each row of the table its measures as lists [layers][heads]."""
    detail = report.by("layer", "kv_head")
    layers, heads = (sorted({getattr(row, name) for row in detail}) for name in ("layer", "kv_head"))
    known = {(_line(row), row.layer, row.kv_head): row for row in detail}

    def grid(row: RecallRow, measure: str) -> list[list[float | None]]:
        cells = [[known.get((_line(row), layer, head)) for head in heads] for layer in layers]
        return [[None if cell is None else getattr(cell, measure) for cell in line] for line in cells]

    return {
        "layers": layers,
        "heads": heads,
        "rows": [{measure: grid(row, measure) for measure in MAPPED} for row in rows],
    }


def _line(row: RecallRow) -> tuple[str, str, Budget, int]:
    return row.method, row.variant, Budget(row.budget), row.together
