"""A recall report as a table with its legend, as CSV and as JSON: their columns have the same names."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sparsekv.cli.common.console import say, say_csv, show
from sparsekv.cli.common.stats import MORE_THAN_EVERYTHING
from sparsekv.cli.common.stored import storage_record
from sparsekv.cli.reporting.legend import legend
from sparsekv.formats.documents.document_hints import eval_hint
from sparsekv.formats.errors import UsageError
from sparsekv.formats.hints import add_methods_hint
from sparsekv.formats.reader import Artifact
from sparsekv.indexing.indexers.registry import indexer_of, indexers
from sparsekv.runtime.reporting.front import in_order, pareto_front, row_records
from sparsekv.runtime.reporting.report import RecallReport, RecallRow
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.configure import changed_options

COLUMNS = {
    "selected_tokens": ",.0f",
    "recall": ".3f",
    "attention_mass": ".3f",
    "output_error": ".4f",
    "kv_fraction": ".3f",
    "missed_mass": ".3f",
}
"""Fields of a row that every table shows, with the format of their numbers."""
OPTIONAL_COLUMNS = ("missed_estimate", "recall_seen", "list_coverage", "raised", "dense")
"""Fields that are shown if at least one method has a value for them."""
ANSWERING = 2
"""How many methods a report suggests to evaluate."""
RIVALS = 3
"""Times the least error that another method may have to be suggested too."""


def report_record(report: RecallReport, rows: Sequence[RecallRow], within: float) -> dict[str, Any]:
    """The whole report as --json prints it, with these rows."""
    best, records = report.best_within(within), row_records(rows)
    lowest = next((record for row, record in zip(rows, records, strict=True) if row == best), None)
    about = {field.name: getattr(report, field.name) for field in fields(report) if field.name != "rows"}
    about["kv_storage"] = storage_record(report.kv_storage)
    return {**about, "within": within, "best": lowest, "rows": records}


def print_csv(rows: Sequence[RecallRow]) -> None:
    """A line for each row, as the table orders them, and a header."""
    say_csv([*(field.name for field in fields(RecallRow)), "front"], row_records(in_order(rows)))


def print_report(report: RecallReport, groups: Sequence[str], within: float, stored: str | None, answers: str) -> None:
    """The table, its legend, the row of lowest error that reads at most `within`, and how answers are measured.

    Args:
        groups: the columns that rows are grouped by, of `layer` and `kv_head`.
        stored: the result of `stored_line`.
        answers: the result of `answers_line`.
    """
    rows, best = report.by(*groups), report.best_within(within)
    show(_table(report, rows, groups))
    say("\n".join(legend(rows)))
    say(best_line(best, within, shared=any(row.together > 1 for row in rows)))
    if most := [row for row in rows if row.kv_fraction > 1]:
        named = dict.fromkeys(row.name for row in most)
        say(f"kv fraction above 1 ({', '.join(named)}): {MORE_THAN_EVERYTHING}.")
    if stored is not None:
        say(f"{stored} The errors above are against dense attention over the stored ones.")
    say(answers)


def answers_line(artifact: Artifact, report: RecallReport, within: float) -> str:
    """How right answers are measured, which an error is not: of methods of least error that read at most `within`."""
    ranked = [row for row in report.ranked_within(within) if row.kv_fraction]
    rivals = [row for row in ranked if row.output_error <= RIVALS * ranked[0].output_error]
    names = list(dict.fromkeys(row.method for row in rivals))[:ANSWERING]
    chosen = [part for name in names for part in ("--method", name)]
    how = eval_hint(artifact.folder, artifact.manifest, *chosen, *_built_by(artifact, names))
    return f"A mean error hides the failure of a single token: right answers are measured with {how}."


def lacking_line(artifact: Artifact) -> str:
    """The methods that have no row, as the index was built without them, and how one is added; empty where none is."""
    known = {name: indexer for name, indexer in indexers().items() if name not in artifact.manifest.methods}
    # First what costs least to have: small files, that an append can go on with.
    lacking = sorted(known, key=lambda name: (known[name]().bytes_per_token(128), not known[name].takes_tokens))
    how = add_methods_hint(artifact.folder, lacking[:1])
    return f"this index lacks {', '.join(lacking)}; {how} adds the first of them" if lacking else ""


def _built_by(artifact: Artifact, names: Sequence[str]) -> list[str]:
    """The options of `build-index` that made the index of some methods what it is."""
    records, known = artifact.manifest.methods, indexers()
    here = [name for name in names if name in records and name in known]
    try:
        return changed_options(*(indexer_of(known[name], records[name].parameters) for name in here))
    except (UsageError, TypeError, ValueError):  # a manifest may say anything
        return []


def best_line(best: RecallRow | None, within: float, *, shared: bool) -> str:
    """The row of lowest error that reads at most `within`, as a sentence. `shared`: rows are of several queries."""
    if best is None:
        return f"Nothing here reads as little as {within:g} (--within) of the document's keys and values."
    return (
        f"Lowest error at a kv fraction up to {within:g}: {best.method} {best.variant}".rstrip()
        + f" at {Budget(best.budget)}{f', {best.together} together' if shared else ''}, error {best.output_error:.4f}, "
        f"recall {best.recall:.3f}."
    )


def _table(report: RecallReport, rows: Sequence[RecallRow], groups: Sequence[str]) -> Table:
    table = Table(
        title=f"{report.index}: {report.n_context:,} tokens, {report.n_middle:,} indexed, "
        f"{report.n_queries} queries, {report.model}, prefill {report.prefill}",
        title_justify="left",
        title_style="",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    shared = ["together"] if any(row.together > 1 for row in rows) else []
    optional = [name for name in OPTIONAL_COLUMNS if any(getattr(row, name) is not None for row in rows)]
    table.add_column("")
    # A narrow terminal breaks a form's words, and never a method's name.
    longest = max((len(word) for row in rows for word in f"{row.method} {row.variant}".split()), default=0)
    table.add_column("method", vertical="bottom", min_width=longest)
    for name in [*shared, *groups]:
        table.add_column(name.replace("_", " "), vertical="bottom")
    for name in ("budget", *COLUMNS, *optional):
        table.add_column(name.replace("_", "\n"), justify="right", no_wrap=True, vertical="bottom")
    front, ordered = set(pareto_front(rows)), in_order(rows)
    for row, after in zip(ordered, [*ordered[1:], None], strict=True):
        table.add_row(
            "*" if row in front else "",
            f"{row.method} {row.variant}".strip(),
            *(str(getattr(row, group)) for group in [*shared, *groups]),
            str(Budget(row.budget)),
            *(_number(getattr(row, name), form) for name, form in COLUMNS.items()),
            *(_number(getattr(row, name), ".3f") for name in optional),
            end_section=after is not None and after.budget_tokens != row.budget_tokens,
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
