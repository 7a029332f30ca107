"""Show a recall report as a table with its legend, as CSV, as JSON and as an HTML page."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sparsekv.cli.common.console import say_csv, say_wrapped
from sparsekv.cli.common.stats import (
    MORE_THAN_EVERYTHING,
    MORE_TOGETHER,
    counted_dtype,
    storage_record,
    stored_line,
    windows_line,
)
from sparsekv.cli.common.tables import show_fitting
from sparsekv.cli.pages.page import Page, budget_text, budget_texts, report_page
from sparsekv.formats.documents.document_hints import eval_hint
from sparsekv.formats.errors import UsageError, add_methods_hint, command
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import Manifest
from sparsekv.indexing.indexers.interface import indexer_of, indexers
from sparsekv.runtime.reporting.report import RecallReport, RecallRow, in_order, pareto_front, row_records
from sparsekv.runtime.selection.interface import Budget, methods
from sparsekv.runtime.selection.registry import changed_options
from sparsekv.runtime.selection.token_choice import LayerSharing

LEGEND = (
    "*: on the Pareto front: no method here reads less of the document and errs less.",
    "recall: share of the oracle's tokens that were selected.",
    "attention mass: share of the attention on the document that the selected tokens get.",
    "output error: relative error of attention's output.",
    "kv fraction: rows read per step, index included, as a share of dense attention's; rows are keys and values in "
    "{dtype}.",
    "missed: share of all attention on tokens that were not selected.",
)
OPTIONAL = {
    "missed_estimate": "missed estimate: a step's own estimate of missed, from its centroids; empty without centroids.",
    "recall_seen": "recall seen: recall on the last of the document's queries from which the index was built.",
    "list_coverage": "list coverage: share of the oracle's tokens that are in the lists that were read.",
    "raised": "raised, dense: share of the queries for which the guard raised the budget, or read everything.",
}
"""Explanations of optional columns, by the name of a field of the column."""
ROUNDING = 1e-6


def legend(rows: Sequence[RecallRow], manifest: Manifest) -> list[str]:
    """Return the lines to print below a table of these report rows. `manifest` is the index's manifest."""
    columns = [line for name, line in OPTIONAL.items() if any(getattr(row, name) is not None for row in rows)]
    fixed = [line.format(dtype=counted_dtype(manifest)) for line in LEGEND]
    return [*fixed, *columns, *_odd(rows, manifest.split.middle), *filter(None, [windows_line(manifest)])]


def _odd(rows: Sequence[RecallRow], middle: int) -> list[str]:
    """Return explanations of surprising values in the rows of an index with `middle` tokens between sinks and tail."""
    bounds = [row for row in rows if methods()[row.method].is_bound]
    usable = [row for row in rows if row not in bounds]
    all_keys = [row for row in usable if methods()[row.method].reads_all_keys]
    alone = [row for row in usable if row.together == 1]  # a budget is of one query
    sharing = [row for row in alone if issubclass(methods()[row.method], LayerSharing)]
    found = {
        "the best tokens of each query, known in hindsight: an upper bound of recall, not a method to answer with.": (
            bounds
        ),
        "reads nothing between sinks and tail. Nothing reads less, so it has a star whatever its error.": [
            row for row in pareto_front(usable) if row.kv_fraction == 0
        ],
        "reads every key to choose. Keys are half of all keys and values, so the kv fraction is above 0.5.": all_keys,
        "ranks every key by exact attention, and so chooses the oracle's tokens.": [
            row for row in all_keys if row.recall >= 1 - ROUNDING and row.selected_tokens < middle
        ],
        "selects more tokens than the budget allows, because some of its layers attend to all tokens.": [
            row for row in sharing if row.selected_tokens > row.budget_tokens
        ],
        "selects more tokens than the budget allows.": [
            row for row in alone if row not in sharing and row.selected_tokens > row.budget_tokens + 1
        ],
    }
    return [f"{_names(of)}: {what}" for what, of in found.items() if of]


def _names(rows: Iterable[RecallRow]) -> str:
    return ", ".join(dict.fromkeys(row.method for row in rows))


COLUMNS = {
    "selected_tokens": ",.0f",
    "recall": ".3f",
    "attention_mass": ".3f",
    "output_error": ".4f",
    "kv_fraction": ".3f",
    "missed_mass": ".3f",
}
"""Fields of a row that every table shows, with their number formats."""
OPTIONAL_COLUMNS = ("missed_estimate", "recall_seen", "list_coverage", "raised", "dense")
"""Fields that are shown if at least one row has a value for them."""
LESSER = (
    "dense",
    "raised",
    "list coverage",
    "recall seen",
    "missed estimate",
    "selected tokens",
    "attention mass",
    "missed mass",
)
"""Headers of the columns that a narrow terminal leaves out, in this order."""
ANSWERING = 2
"""Largest number of methods that a report suggests for `eval`."""
RIVALS = 3
"""A method may be suggested if its error is at most this many times the least error."""


def report_record(report: RecallReport, rows: Sequence[RecallRow], within: float) -> dict[str, Any]:
    """Return the record that --json prints: the whole report with these rows."""
    rows, best = in_order(rows), report.best_within(within)
    records = row_records(rows)
    lowest = next((record for row, record in zip(rows, records, strict=True) if row == best), None)
    about = {field.name: getattr(report, field.name) for field in fields(report) if field.name != "rows"}
    about["kv_storage"] = storage_record(report.kv_storage)
    return {**about, "within": within, "best": lowest, "rows": records}


def print_csv(rows: Sequence[RecallRow]) -> None:
    """Print the rows as CSV, in the order of the table, after a header."""
    say_csv([*(field.name for field in fields(RecallRow)), "front"], row_records(in_order(rows)))


def print_report(report: RecallReport, groups: Sequence[str], within: float, manifest: Manifest, answers: str) -> None:
    """Print the table, its legend, a sentence about the best row, and the line `answers`.

    Also print a line about rows with a KV fraction above 1, and for an index with int8 rows a line about their error.

    Args:
        groups: the columns by which rows are grouped: `layer`, `kv_head`, both or none.
        within: largest kv fraction of the best row, which is the row with the least error.
        manifest: manifest of the reported index.
        answers: the result of `answers_line`.
    """
    rows = report.by(*groups)
    show_fitting(report_table(report, groups), LESSER)
    lines = [*legend(rows, manifest), best_line(report, within)]
    for why, of in ((MORE_THAN_EVERYTHING, [1]), (MORE_TOGETHER, {row.together for row in rows} - {1})):
        if named := dict.fromkeys(row.name for row in rows if row.together in of and row.kv_fraction > 1):
            lines.append(f"kv fraction above 1 ({', '.join(named)}): {why}.")
    if (stored := stored_line(manifest)) is not None:
        lines.append(f"{stored} The errors above are against dense attention over the stored ones.")
    say_wrapped([*lines, answers])


def answers_line(artifact: Artifact, report: RecallReport, within: float) -> str:
    """Return a sentence with the `eval` command for the methods of least error at a kv fraction up to `within`.

    A report's error is not a rate of right answers; only `eval` counts right answers.
    """
    ranked = [row for row in report.ranked_within(within) if row.kv_fraction]
    rivals = [row for row in ranked if row.output_error <= RIVALS * ranked[0].output_error]
    names = list(dict.fromkeys(row.method for row in rivals))[:ANSWERING]
    chosen = [part for name in names for part in ("--method", name)]
    how = eval_hint(artifact.folder, artifact.manifest, *chosen, *_built_by(artifact, names))
    return f"A mean error hides the failure of a single token: right answers are measured with {how}."


def lacking_line(artifact: Artifact) -> str:
    """Return a line with the methods that the index lacks, and the command that adds the first of them. Empty if the
    index has all methods."""
    known = {name: indexer for name, indexer in indexers().items() if name not in artifact.manifest.methods}
    # The cheapest methods come first: small files, and an index that can append tokens.
    lacking = sorted(known, key=lambda name: (known[name]().bytes_per_token(128), not known[name].takes_tokens))
    how = add_methods_hint(artifact.folder, lacking[:1])
    return f"this index lacks {', '.join(lacking)}; {how} adds the first of them" if lacking else ""


def _built_by(artifact: Artifact, names: Sequence[str]) -> list[str]:
    """Return the options of `build-index` that differed from their defaults when the named methods were built.

    Empty if the manifest has parameters that this version cannot use.
    """
    records, known = artifact.manifest.methods, indexers()
    here = [name for name in names if name in records and name in known]
    try:
        return changed_options(*(indexer_of(known[name], records[name].parameters) for name in here))
    except (UsageError, TypeError, ValueError):  # a manifest may contain any values
        return []


def best_line(report: RecallReport, within: float) -> str:
    """Return a sentence about the row of least error at a kv fraction up to `within`.

    Without such a row, the sentence gives the reason: every row reads more, or all were measured for several queries
    together (`--together` without 1).
    """
    best, numbers = report.best_within(within), {row.together for row in report.rows}
    if 1 not in numbers:
        return f"--within {within:g} names a method for queries alone; add 1 to --together to measure them."
    if best is None:
        return f"Nothing here reads as little as {within:g} (--within) of the document's keys and values."
    together = f", {best.together} together" if len(numbers) > 1 else ""
    return (
        f"Lowest error at a kv fraction up to {within:g}: {best.method} {best.variant}".rstrip()
        + f" at {Budget(best.budget)}{together}, error {best.output_error:.4f}, recall {best.recall:.3f}."
    )


def report_table(report: RecallReport, groups: Sequence[str]) -> Table:
    """Return the table of a report, with a row for each value of the columns in `groups`."""
    rows = report.by(*groups)
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
    table.add_column("method", vertical="bottom")
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


MAPPED = ("recall", "output_error")
"""Fields of a row that the HTML page draws by layer and head."""


def recall_page(report: RecallReport, within: float, answers: str) -> Page:
    """Render the HTML page. Its rows are averages over all layers and heads, in the order of the table.

    Args:
        within: largest kv fraction of the best row, which is the row with the least error.
        answers: the result of `answers_line`.
    """
    rows = in_order(report.by())
    question = command("trace", "--index", report.index, "What is this about?").strip("`")
    data = report_record(report, rows, within) | {"maps": _maps(report, rows), "answers": answers, "trace": question}
    best = data["best"]
    data["budgets"] = {"rows": budget_texts(data["rows"]), "best": "" if best is None else budget_text(best["budget"])}
    return report_page(f"Recall report of {Path(report.index).name}", data, "recall_page.js")


def _maps(report: RecallReport, rows: Sequence[RecallRow]) -> dict[str, Any]:
    """Return the layers, the KV heads, and for each row a map of each field in MAPPED, as lists [layers][heads]."""
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
