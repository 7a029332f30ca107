"""Show an evaluation as a table, as JSON, as CSV and as an HTML page."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from sparsekv.cli.common.console import note, say, say_csv
from sparsekv.cli.common.options import FormatOptions, refuse_impossible_name
from sparsekv.cli.common.tables import differing, grouped, say_markup, show_fitting, titled_table
from sparsekv.cli.pages.page import Page, budget_texts, refuse_other_file, replace_file, report_page
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import AUTO
from sparsekv.runtime.evaluation.table import Cell, Score
from sparsekv.runtime.selection.interface import Budget


def evaluation_page(record: dict[str, Any]) -> Page:
    """Render the HTML page of the output of `eval --json`."""
    texts = {name: budget_texts(record[name]) for name in ("rows", "depths")}
    return report_page(f"Evaluation on {record['document']}", record | {"budgets": texts}, "eval_page.js")


FEW_CONTEXTS = 10
"""With fewer contexts, a bootstrap over them gives confidence intervals that are too narrow."""


def evaluation_record(rows: Sequence[Score], cells: Sequence[Cell], about: dict[str, Any]) -> dict[str, Any]:
    """Return the record that --json prints."""
    return {**about, "rows": [asdict(row) for row in rows], "depths": [asdict(cell) for cell in cells]}


ANSWERS, ANSWERS_ENDING, ANSWERS_START = "--answers", ".jsonl", '{"task": '
"""The option that names a file of answers, the file's ending, and how its first line begins."""


def refuse_unwritable_answers(path: Path | None) -> None:
    """Check, before anything is measured, that the file of `--answers` can be written.

    Raises:
        UsageError: the file name has another ending or is not valid, or its folder is missing.
        SparsekvError: a file exists that has no answers of `eval`.
    """
    if path is None:
        return
    refuse_impossible_name(path, ANSWERS)
    if path.suffix.lower() != ANSWERS_ENDING:
        named = path.with_suffix(ANSWERS_ENDING)
        raise UsageError(f"{ANSWERS} {path}: answers are lines of JSON, in a file that ends in .jsonl; give {named}")
    refuse_other_file(path, ANSWERS, "file of answers", ANSWERS_START)


def write_answers(records: Iterable[dict[str, Any]], path: Path, *, quiet: bool) -> None:
    """Write records of answers, one for each question, method and budget, as lines of JSON.

    The file is written whole or not at all. Raises the errors of `refuse_unwritable_answers`, and SparsekvError if the
    file cannot be written.
    """
    refuse_unwritable_answers(path)
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    replace_file(path, "".join(lines), ANSWERS, "answers")
    note(f"answers: {path}", quiet=quiet)


DIFFERENCE, SAME = "difference to dense [95%]", "same as dense"
GROUPING = ("task", "length", "metric")
"""Fields of a row by which the tables for a terminal are divided."""


def print_rows(rows: Sequence[Score], cells: Sequence[Cell], about: dict[str, Any], form: FormatOptions) -> None:
    """Print the rows to stdout as JSON, as CSV, as one table in a markup language, or as tables by task, length and
    metric."""
    if form.as_json:
        say(json.dumps(evaluation_record(rows, cells, about), indent=1))
    elif form.as_csv:
        say_csv([field.name for field in fields(Score)], (asdict(row) for row in rows))
    elif form.markup:
        say_markup(_table(rows, about), form.markup)
    else:
        for group in grouped(rows, GROUPING):
            show_fitting(_table(group, about), ("s", SAME, "kv fraction", DIFFERENCE))


def note_few_contexts(rows: Sequence[Score], *, quiet: bool) -> None:
    """Print a note if a row is of fewer than FEW_CONTEXTS contexts.

    The row's confidence interval is then too narrow. A row of one question has no interval.
    """
    fewest = min(rows, key=lambda row: row.contexts)
    if fewest.contexts < FEW_CONTEXTS:
        why = "are too narrow: other contexts would differ by more" if fewest.questions > 1 else "are unknown"
        note(f"the intervals of {_counted(fewest)} {why}; ask about {FEW_CONTEXTS} contexts or more", quiet=quiet)


def note_wrong_baselines(rows: Sequence[Score], *, cut: bool = False, quiet: bool) -> None:
    """Print a note that names the tasks, with lengths, in which dense attention answers no question rightly, if any.

    Args:
        cut: the user set the largest number of tokens of an answer, which may be too few for a right one.
    """
    wrong = [row for row in rows if row.difference is None and row.turn is None and row.unit == "%" and row.score == 0]
    if wrong:
        named = [row.task if row.length is None else f"{row.task} of {row.length:,} tokens" for row in wrong]
        told = f"dense attention has 0% in {', '.join(dict.fromkeys(named))}, so no row there shows a method's loss"
        larger = "a larger --max-new-tokens, a larger model" if cut else "a larger model"
        note(f"{told}; take {larger} or an easier task", quiet=quiet)


def note_unbuilt(contexts: int, *, quiet: bool) -> None:
    """Print a note if --keep-indices kept no index of some contexts, because all their answers were stored already.

    Args:
        contexts: number of these contexts.
    """
    if contexts:
        counted = f"{contexts} context{'s' * (contexts != 1)}"
        told = f"--keep-indices keeps no index of {counted}: all answers were stored, so no index was built"
        note(f"{told}; give another --work to build one", quiet=quiet)


def _counted(row: Score) -> str:
    questions, contexts = ("s" if number != 1 else "" for number in (row.questions, row.contexts))
    return f"{row.questions} question{questions} about {row.contexts} context{contexts}"


def _table(rows: Sequence[Score], about: dict[str, Any]) -> Table:
    """Return a table of scores.

    It has a column for each field of GROUPING, and for `prefill` and `turn`, whose values differ between the rows. With
    several prefills, the title names the prefill of the dense attention that all rows are compared with.
    """
    first, divided = rows[0], [*differing(rows, GROUPING), *differing(rows, ("prefill", "turn"))]
    asked = "" if first.length is None else f" ({first.length:,} asked for)"
    mean = "" if first.contexts == 1 else "on average "
    unit = f" in {first.unit}" if first.unit else ""
    stored = "" if about["weights"] == AUTO else f", {about['weights']} weights"
    stored += "" if about["kv_dtype"] == AUTO else f", keys and values in {about['kv_dtype']}"
    stored += "" if about["rope_scaling"] is None else f", RoPE {about['rope_scaling']}"
    compared = f", compared with dense attention after the {first.prefill} prefill" if "prefill" in divided else ""
    table = titled_table(
        f"{first.task}: {_counted(first)} of {mean}"
        f"{first.tokens:,.0f} tokens{asked}, {first.metric}{unit}, {about['model']}{stored}{compared}",
        [*divided, "method"],
        ["budget", "score [95%]", DIFFERENCE, SAME, "kv fraction", "s"],
    )
    for group in grouped(rows, (*GROUPING, "turn")):
        for row in group:
            table.add_row(
                *(_cell(getattr(row, name)) for name in divided),
                f"{row.method} {row.variant}".strip(),
                "" if row.budget is None else str(Budget(row.budget)),
                _with_bounds(row.score, row.score_low, row.score_high, ""),
                _with_bounds(row.difference, row.difference_low, row.difference_high, "+"),
                "" if row.same_as_dense is None else f"{row.same_as_dense:.1f}%",
                "" if row.kv_fraction is None else f"{row.kv_fraction:.3f}",
                f"{row.seconds:.2f}",
            )
        table.add_section()
    return table


def _cell(value: Any) -> str:
    """Format the value of a field by which rows differ. The turn of a row over all turns is None."""
    return "all" if value is None else str(value)


def _with_bounds(value: float | None, low: float | None, high: float | None, sign: str) -> str:
    """Format a number and the bounds of its interval, if it has one. `sign` is the sign option of a format."""
    if value is None:
        return ""
    return f"{value:{sign}.1f}" + ("" if low is None or high is None else f" [{low:{sign}.1f}, {high:{sign}.1f}]")
