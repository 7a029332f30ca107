"""`sparsekv recall-report`: what each method keeps of the model's attention on this document, and what it reads."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sparsekv.cli.common.console import note, progress, say, say_csv, show
from sparsekv.cli.common.index_option import open_artifact
from sparsekv.cli.common.loading import load_for
from sparsekv.cli.common.options import (
    DeviceOption,
    DtypeOption,
    IndexOption,
    JsonOption,
    ModelOption,
    QuietOption,
    SpecialTokensOption,
)
from sparsekv.cli.common.plot_option import refuse_unwritable_plot
from sparsekv.cli.common.questions import read_questions
from sparsekv.cli.common.small_budgets import note_small_budgets
from sparsekv.cli.common.stats import MORE_THAN_EVERYTHING
from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.guard import Guard
from sparsekv.runtime.decoding.prepare import residual_source
from sparsekv.runtime.reporting.queries import MeasuredQueries
from sparsekv.runtime.reporting.report import RecallReport, RecallRow
from sparsekv.runtime.reporting.report import recall_report as measure
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.registry import choose_methods

app = typer.Typer(rich_markup_mode=None, add_completion=False)

DEFAULT_BUDGETS = ["0.02", "0.05", "0.1"]
TOLD = {
    "missed_estimate": "estimate",
    "recall_seen": "seen",
    "list_coverage": "listed",
    "raised": "more",
    "dense": "all",
}
"""Columns that are shown where some method has them."""
BY = {"layer": "layer", "head": "kv_head"}


@app.command()
def recall_report(
    index: IndexOption = None,
    method: Annotated[list[str] | None, typer.Option(help="A method; repeatable. Default: all that can run.")] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="Share (0.05, 5%) or number of tokens; repeatable. Default: 2%, 5% and 10%."),
    ] = None,
    queries: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Measure on these questions, one a line, not on the held-out tail."),
    ] = None,
    residual: Annotated[
        bool, typer.Option("--residual", help="Each method also with centroids for what it does not choose.")
    ] = False,
    guard: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Each method also reading more for heads that leave more than this of attention.",
        ),
    ] = None,
    within: Annotated[
        float, typer.Option(help="Name the lowest error among what reads at most this share of keys and values.")
    ] = 0.12,
    by: Annotated[str | None, typer.Option(metavar="layer,head", help="Rows for each layer, KV head or both.")] = None,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV on stdout.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Recall and error against rows read, recall by layer and head."),
    ] = None,
    special_tokens: SpecialTokensOption = False,
    model: ModelOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    quiet: QuietOption = False,
) -> None:
    """Compare methods and budgets by what they keep of dense attention.

    Recall is the share of the oracle's tokens that a method chose; mass the attention on what it chose; error that
    of the attention's output; KV read what it reads of the document's keys and values, its index included; left the
    attention on what it did not choose, and by estimate as a step itself can tell; seen is recall on queries of the
    document that the method's index was built from, listed the share of the oracle's tokens that its lists name. Under
    a --guard, more and all are the shares of heads that had to read more, or everything.

    \b
    sparsekv recall-report --index manual.skv
    sparsekv recall-report --index manual.skv --budget 0.05 --by layer --csv > layers.csv
    sparsekv recall-report --index manual.skv --queries questions.txt --plot recall.png
    """
    if as_json and as_csv:
        raise UsageError("--json and --csv exclude each other: choose one")
    groups = _groups(by)
    budgets = [Budget.parse(text) for text in dict.fromkeys(budget or DEFAULT_BUDGETS)]
    refuse_unwritable_plot(plot)
    artifact = open_artifact(index, thorough=True)
    names = choose_methods(method or [], list(artifact.manifest.methods))
    guarded = None if guard is None else Guard(guard)
    if residual:
        residual_source(artifact)
    asked = MeasuredQueries(artifact)
    if queries is not None:
        questions = read_questions(queries, "--queries")
        opened = load_for(artifact, model, device, dtype, quiet=quiet)
        asked = MeasuredQueries(artifact, opened, questions, special_tokens=special_tokens)
    note_small_budgets(budgets, quiet=quiet)
    with progress(quiet=quiet) as tell:
        report = measure(
            artifact,
            names,
            budgets,
            asked,
            lambda done, of: tell("layers", done, of),
            residual=residual,
            guard=guarded,
        )
    if plot is not None:
        from sparsekv.cli.common.plots import plot_recall

        plot_recall(report, plot)
        note(f"plot: {plot}", quiet=quiet)
    rows, best = report.by() + (report.by(*groups) if groups else []), report.best_within(within)
    if as_json:
        say(
            json.dumps(
                {
                    **asdict(report),
                    "within": within,
                    "best": None if best is None else asdict(best),
                    "rows": [asdict(row) for row in rows],
                },
                indent=1,
            )
        )
    elif as_csv:
        say_csv([field.name for field in fields(RecallRow)], (asdict(row) for row in rows))
    else:
        _print_table(report, report.by(*groups), groups)
        say(_best_line(best, within))
        if most := [row for row in rows if row.kv_fraction > 1]:
            named = dict.fromkeys(f"{row.method} {row.variant}".strip() for row in most)
            say(f"KV read above 1 ({', '.join(named)}): {MORE_THAN_EVERYTHING}.")


def _groups(by: str | None) -> list[str]:
    names = [name.strip() for name in by.split(",")] if by else []
    for name in names:
        if name not in BY:
            raise UsageError(f"--by {by}: give layer, head or layer,head")
    return [BY[name] for name in names]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _best_line(best: RecallRow | None, within: float) -> str:
    if best is None:
        return f"Nothing here reads as little as {within:g} of the document's keys and values."
    return (
        f"Lowest error at KV read up to {within:g}: {best.method} {best.variant}".rstrip()
        + f" at {Budget(best.budget)}, error {best.output_error:.4f}, recall {best.recall:.3f}."
    )


def _print_table(report: RecallReport, rows: list[RecallRow], groups: list[str]) -> None:
    table = Table(
        title=f"{report.index}: {report.n_context:,} tokens, {report.n_middle:,} indexed, "
        f"{report.n_queries} queries, {report.model}, prefill {report.prefill}",
        title_justify="left",
        title_style="",
    )
    for name in ["method", *groups]:
        table.add_column(name)
    told = {name: title for name, title in TOLD.items() if any(getattr(row, name) is not None for row in rows)}
    for name in ("budget", "tokens", "recall", "mass", "error", "KV read", "left", *told.values()):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.method} {row.variant}".strip(),
            *(str(getattr(row, group)) for group in groups),
            str(Budget(row.budget)),
            f"{row.selected_tokens:,.0f}",
            f"{row.recall:.3f}",
            f"{row.attention_mass:.3f}",
            f"{row.output_error:.4f}",
            f"{row.kv_fraction:.3f}",
            f"{row.missed_mass:.3f}",
            *(_number(getattr(row, name)) for name in told),
        )
    show(table)
