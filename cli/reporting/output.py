"""The table of a recall report, and its last line."""

from rich.table import Table

from sparsekv.cli.common.console import show
from sparsekv.runtime.reporting.report import RecallReport, RecallRow
from sparsekv.runtime.selection.budget import Budget

OPTIONAL_COLUMNS = {
    "missed_estimate": "estimate",
    "recall_seen": "seen",
    "list_coverage": "listed",
    "raised": "more",
    "dense": "all",
}
"""Columns shown only if at least one method has a value for them: field of RecallRow, then title."""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def best_line(best: RecallRow | None, within: float) -> str:
    """The row of lowest error that reads at most `within`, as a sentence."""
    if best is None:
        return f"Nothing here reads as little as {within:g} (--within) of the document's keys and values."
    return (
        f"Lowest error at KV read up to {within:g}: {best.method} {best.variant}".rstrip()
        + f" at {Budget(best.budget)}, error {best.output_error:.4f}, recall {best.recall:.3f}."
    )


def print_table(report: RecallReport, rows: list[RecallRow], groups: list[str]) -> None:
    """Rows on stdout; `groups` are the columns that they are grouped by, of `layer` and `kv_head`."""
    table = Table(
        title=f"{report.index}: {report.n_context:,} tokens, {report.n_middle:,} indexed, "
        f"{report.n_queries} queries, {report.model}, prefill {report.prefill}",
        title_justify="left",
        title_style="",
    )
    shared = ["together"] if any(row.together > 1 for row in rows) else []
    for name in ["method", *shared, *groups]:
        table.add_column(name)
    optional = {
        name: title for name, title in OPTIONAL_COLUMNS.items() if any(getattr(row, name) is not None for row in rows)
    }
    for name in ("budget", "tokens", "recall", "mass", "error", "KV read", "left", *optional.values()):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.method} {row.variant}".strip(),
            *(str(getattr(row, group)) for group in shared + groups),
            str(Budget(row.budget)),
            f"{row.selected_tokens:,.0f}",
            f"{row.recall:.3f}",
            f"{row.attention_mass:.3f}",
            f"{row.output_error:.4f}",
            f"{row.kv_fraction:.3f}",
            f"{row.missed_mass:.3f}",
            *(_number(getattr(row, name)) for name in optional),
        )
    show(table)
