"""`sparsekv recall-report`: measure on a document how much of dense attention each method keeps, and how much it
reads."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsekv.cli.common.console import note, progress, say
from sparsekv.cli.common.method_options import note_budgets, with_options
from sparsekv.cli.common.open_artifact import open_artifact
from sparsekv.cli.common.options import (
    FormatOptions,
    IndexOption,
    ModelOption,
    RunOptions,
    SpecialTokensOption,
    WeightsOption,
    names_of,
    refuse_unwritable_plot,
    share,
)
from sparsekv.cli.common.questions import read_lines
from sparsekv.cli.common.tables import say_markup
from sparsekv.cli.configuring.sources import Command, on_command_line
from sparsekv.cli.pages.page import HtmlOption, refuse_unwritable_html, write_html
from sparsekv.cli.reporting.output import (
    answers_line,
    lacking_line,
    print_csv,
    print_report,
    recall_page,
    report_record,
    report_table,
)
from sparsekv.formats.device import choose_device
from sparsekv.formats.errors import UsageError, any_of
from sparsekv.formats.index.reader import Artifact
from sparsekv.runtime.attention.guard import Guard, estimates_missed
from sparsekv.runtime.decoding.choose_config import refuse_residual
from sparsekv.runtime.decoding.prepare import residual_source
from sparsekv.runtime.reporting.recall import MeasuredQueries
from sparsekv.runtime.reporting.report import RecallReport, forms
from sparsekv.runtime.reporting.report import recall_report as measure
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec, methods
from sparsekv.runtime.selection.registry import configured_form, methods_of, refuse_unused

app = typer.Typer(rich_markup_mode=None, add_completion=False)

DEFAULT_BUDGETS = ["0.02", "0.05", "0.1"]
BY = {"layer": "layer", "head": "kv_head"}


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Command-line options of `recall-report`."""

    ctx: typer.Context
    index: IndexOption = None
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Method to measure; repeatable. Default: all that can run.", autocompletion=names_of(methods, "all")
        ),
    ] = None
    budget: Annotated[
        list[str] | None,
        typer.Option(
            help="Share (0.05, 5%) or number of tokens to attend to; repeatable. Default: 2%, 5%, 10%, and the budgets "
            "that answers of these methods have."
        ),
    ] = None
    queries: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Measure on these questions, one per line, instead of the held-out tail."),
    ] = None
    residual: Annotated[
        bool,
        typer.Option(
            "--residual",
            help="Measure each method that drops the tokens it does not select a second time, with centroids for these "
            "tokens.",
        ),
    ] = False
    guard: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            parser=share,
            help=(
                "Measure each method a second time under a limit. A head whose estimated share of attention left "
                "to centroids or dropped is above the limit gets a larger budget, and in the end attends to all "
                "tokens."
            ),
        ),
    ] = None
    within: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            parser=share,
            help="Below the table, name the method of lowest error among those whose kv_fraction is at most this.",
        ),
    ] = 0.12
    together: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            help=(
                "Also measure this many queries together, such as 1,4,16,64: each of them attends to the tokens "
                "that any of them selects, as with --batch-size of `generate`. With --queries, each question's "
                "last token before the ending that all questions share is measured."
            ),
        ),
    ] = "1"
    by: Annotated[str | None, typer.Option(metavar="layer,head", help="Rows per layer, per KV head, or both.")] = None
    format: FormatOptions
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png", help="Plot recall and error against the kv fraction, and recall by layer and head."
        ),
    ] = None
    html: HtmlOption = None
    special_tokens: SpecialTokensOption = False
    model: ModelOption = None
    weights: WeightsOption = "auto"
    run: RunOptions
    parameters: dict[str, Any]

    def check(self) -> None:
        """Raise UsageError for options that exclude each other or need --queries, for a --within that is not a share,
        and for names of files that cannot be written."""
        if self.queries is None:
            self._refuse_options_of_queries()
        if on_command_line(self.ctx, "within") and (self.format.as_csv or self.format.markup) and self.html is None:
            raise UsageError(f"--within {self.within:g} is about the line below the table for a terminal; leave it out")
        if not 0 < self.within <= 1:
            raise UsageError(f"--within {self.within:g}: give a share between 0 and 1, such as 0.12")
        self.format.check()
        refuse_unwritable_plot(self.plot)
        refuse_unwritable_html(self.html)

    def _refuse_options_of_queries(self) -> None:
        """Raise UsageError for options that only --queries uses. Without --queries no model runs, because the index
        contains the tail's queries."""
        for name in ("model", "dtype", "weights"):
            if on_command_line(self.ctx, name):
                told = f"--{name} {self.ctx.params[name]}"
                raise UsageError(f"{told} has no effect without --queries, because no model is run; leave it out")
        if self.special_tokens:
            raise UsageError("--special-tokens has no effect without --queries; leave it out")

    def refuse_idle(self, compared: list[MethodSpec]) -> None:
        """Raise UsageError if --residual or --guard is on the command line and changes none of the methods.

        Args:
            compared: all variants of the methods, also with a residual where that makes a difference.
        """
        names = dict.fromkeys(one.name for one in compared)
        if on_command_line(self.ctx, "residual") and not any(one.residual for one in compared):
            refuse_residual(names)
        if on_command_line(self.ctx, "guard") and not self.guarded(compared):
            helps = any(estimates_missed(one.method, residual=one.residual) for one in compared)
            raise UsageError(
                f"--guard {self.guard:g} has no effect on {any_of(names)}, whose missed attention cannot be "
                f"estimated; leave it out{', or give --residual' if helps else ''}"
            )

    def guarded(self, compared: list[MethodSpec]) -> list[MethodSpec]:
        """Return the variants that are measured and whose missed attention can be estimated."""
        measured = [one for one in compared if self.residual or not one.residual]
        return [one for one in measured if estimates_missed(one.method, residual=one.residual)]

    @property
    def groups(self) -> list[str]:
        """The columns by which --by groups rows. Raises UsageError for another name."""
        names = list(dict.fromkeys(name.strip() for name in self.by.split(","))) if self.by else []
        for name in names:
            if name not in BY:
                raise UsageError(f"--by {self.by}: give layer, head or layer,head")
        return [BY[name] for name in names]

    @property
    def numbers_together(self) -> list[int]:
        """The numbers of queries that --together lists. Raises UsageError for other text than whole numbers of at
        least 1."""
        found = [part.strip() for part in self.together.split(",")]
        if not all(part.isascii() and part.isdigit() and int(part) for part in found):
            raise UsageError(f"--together {self.together}: give numbers of at least 1, such as 1,4,16,64")
        return list(dict.fromkeys(int(part) for part in found))


@app.command(cls=Command)
@with_options(ReportOptions, methods())
def recall_report(options: ReportOptions) -> None:
    """Compare methods and budgets by how much of dense attention they keep.

    The table has a row for each variant of each method at each budget, with means over queries, layers and KV heads.
    Sinks and tail are always attended to; the columns are about the document's tokens between them. The oracle selects
    the tokens of highest exact attention at the same budget.

    \b
    selected_tokens   Tokens that the method selected.
    recall            Share of the oracle's tokens that the method selected.
    attention_mass    Share of the attention on the document that falls on
                      the selected tokens.
    output_error      Relative error of the attention output.
    kv_fraction       Key, value and index rows that the method reads, as a
                      share of the document's key and value rows.
    missed_mass       Share of all attention, sinks and tail included, that
                      falls on tokens that were not selected.
    missed_estimate   Estimate of missed_mass that a decode step can make
                      without reading the tokens that were not selected.
                      Blank for methods that have no estimate.
    recall_seen       Recall on the last of the document's queries from which
                      the index was built. Blank for indices not built from
                      queries.
    list_coverage     Share of the oracle's tokens that are in a posting list
                      that the method read. Blank for methods without lists.
    raised            Share of heads whose budget the --guard raised.
    dense             Share of heads that read everything under the --guard.
    *, front          On the Pareto front: no other method or budget reads
                      less and errs less. The oracle is not compared.

    Rows are sorted by budget, and within a budget by error. The names above are those of the columns of the table, of
    --csv and of --json. With --by, --csv has a row for each layer or head alone; --json also has the rows over all of
    them, whose layer and kv_head are null. docs/reference/measures.md explains the words.

    By default several variants of a method are measured, such as with and without re-ranking. If you give options of a
    method, such as --rerank 4, only the variant with these options is measured.

    With --together, each of several queries attends to the tokens that any of them selects, and these tokens are read
    once. selected_tokens and kv_fraction count what the queries read together.

    \b
    sparsekv recall-report --index manual.skv
    sparsekv recall-report --index manual.skv --method csattention --method quest --rerank 4
    sparsekv recall-report --index manual.skv --budget 0.05 --by layer --csv > layers.csv
    sparsekv recall-report --index manual.skv --queries questions.txt --plot recall.png --html recall.html
    """
    options.check()
    where = choose_device(options.run.device)
    groups, together = options.groups, options.numbers_together
    artifact = open_artifact(options.index, thorough=True)
    names = methods_of(artifact, options.method or [])
    configured = _configured(names, options.parameters)
    compared = [form for name in names for form in forms(artifact, name, configured.get(name), residual=True)]
    options.refuse_idle(compared)
    budgets = Budget.parse_each(options.budget or DEFAULT_BUDGETS)
    if not options.budget:  # with the budgets of answers, which depend on the length of the document
        middle = artifact.manifest.split.middle
        budgets = list(dict.fromkeys([*budgets, *(one.method.default_budget(middle) for one in compared)]))
    residual = options.residual and any(one.residual for one in compared)
    # A --guard of sparsekv.toml that changes none of these methods is ignored.
    guard = None if options.guard is None or not options.guarded(compared) else Guard(options.guard)
    if residual:
        residual_source(artifact)
    queries = _queries(options, artifact, together)
    note_budgets(budgets, artifact.manifest.split.middle, quiet=options.run.quiet)
    with progress(quiet=options.run.quiet) as tell:
        report = measure(
            artifact,
            names,
            budgets,
            queries,
            lambda done, of: tell("layers", done, of),
            residual=residual,
            guard=guard,
            configured=configured,
            together=together,
            device=where,
            note=partial(note, quiet=options.run.quiet),
        )
    _show(options, artifact, report, groups)


def _configured(names: list[str], parameters: dict[str, Any]) -> dict[str, tuple[str, Method]]:
    """Return a label and the configured method for each method that has a parameter set by the user.

    Raises:
        UsageError: none of the named methods has a given parameter, or a value is not valid.
    """
    chosen = {name: methods()[name] for name in names}
    refuse_unused(chosen, parameters, decoding=chosen, answers=False)
    return {name: found for name, one in chosen.items() if (found := configured_form(one, parameters))}


def _queries(options: ReportOptions, artifact: Artifact, together: list[int]) -> MeasuredQueries:
    """Return the queries to measure on: the tail's queries, or the queries of the questions in --queries.

    Raises:
        UsageError: the file cannot be read or has no question, or there are fewer queries than the largest number in
            `together`.
        SparsekvError: an error of `load_for` or `question_queries`.
    """
    queries = MeasuredQueries(artifact)
    if options.queries is not None:
        questions = [line for line in read_lines(options.queries, "--queries") if line.strip()]
        # Imported here, because only questions need a model. Importing transformers takes seconds.
        from sparsekv.cli.common.loading import load_for
        from sparsekv.runtime.reporting.questions import question_queries

        named = options.model, options.run.device, options.run.dtype
        opened = load_for(artifact, *named, quiet=options.run.quiet, weights=options.weights)
        last = together != [1]
        queries = question_queries(opened, questions, special_tokens=options.special_tokens, last=last)
    if max(together) > len(queries):
        has = "the tail has" if options.queries is None else "--queries has"
        raise UsageError(
            f"--together {options.together}: {has} {len(queries)} queries to measure on; give no larger number"
        )
    return queries


def _show(options: ReportOptions, artifact: Artifact, report: RecallReport, groups: list[str]) -> None:
    """Write the plot and the HTML page that the options name, and print the report."""
    if options.plot is not None:
        from sparsekv.cli.reporting.plots import plot_recall

        plot_recall(report, options.plot)
        note(f"plot: {options.plot}", quiet=options.run.quiet)
    rows, within = report.by(*groups), options.within
    answers = answers_line(artifact, report, within)
    if options.html is not None:
        write_html(recall_page(report, within, answers), options.html, quiet=options.run.quiet)
    if options.format.as_json:
        say(json.dumps(report_record(report, report.by() + (rows if groups else []), within), indent=1))
    elif options.format.as_csv:
        print_csv(rows)
    elif options.format.markup:
        say_markup(report_table(report, groups), options.format.markup)
    else:
        print_report(report, groups, within, artifact.manifest, answers)
        if not options.method and (lacking := lacking_line(artifact)):
            note(lacking, quiet=options.run.quiet)
