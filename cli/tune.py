"""`sparsekv tune`: find the cheapest setting that meets a target, and make it the index's default."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.table import Table

from sparsekv.cli.common.console import note, progress, say, say_wrapped
from sparsekv.cli.common.method_options import with_options
from sparsekv.cli.common.open_artifact import open_artifact
from sparsekv.cli.common.options import (
    IndexOption,
    ModelOption,
    RunOptions,
    TableOptions,
    WeightsOption,
    names_of,
    share,
)
from sparsekv.cli.common.tables import say_markup, show_fitting, titled_table
from sparsekv.cli.configuring.project_file import long_name
from sparsekv.cli.configuring.sources import Command, on_command_line
from sparsekv.formats.device import choose_device
from sparsekv.formats.documents.document_hints import eval_hint
from sparsekv.formats.errors import SparsekvError, UsageError, choose_one
from sparsekv.formats.index.manifest import refuse_unwritable, write_defaults
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import Defaults, TuneTarget
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.benchmark.clock import clock_for
from sparsekv.runtime.decoding.choose_config import choose_config
from sparsekv.runtime.selection.interface import Budget, methods
from sparsekv.runtime.selection.registry import form_options
from sparsekv.runtime.tuning.coarse_search import candidates
from sparsekv.runtime.tuning.goals import REFERENCE, ErrorGoal, Goal, PerplexityGoal, Progress, RecallGoal, Tuned
from sparsekv.runtime.tuning.tuning import tune as find


def cost_ahead(artifact: Artifact, goal: Goal, names: list[str]) -> str:
    """Return a line with the numbers of variants, methods and layers that a search will measure, and its duration.

    Raises the errors of `candidates`.
    """
    forms = candidates(artifact, names, residual=goal.residual)
    of = _counted(len({form.name for form in forms}), "method")
    layers = _counted(len(artifact.manifest.indexed_layers), "layer")
    return (
        f"searching {_counted(len(forms), 'variant')} of {of} for {goal}: some 20 rounds over {layers}, "
        "minutes on a CPU; fewer --method take less"
    )


class Rounds:
    """Shows the progress of a search, and counts its rounds and their time.

    Args:
        show: shows a round's progress.
        begin: called just before the first round is shown. Errors of loading the goal's model come before this call.
    """

    def __init__(self, show: Progress, begin: Callable[[], None]):
        self._show, self._begin, self._stages, self._began = show, begin, set[str](), 0.0

    def show(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` steps of a round, the `stage`, are done."""
        if not self._stages:
            self._begin()
            self._began = time.monotonic()
        self._stages.add(stage)
        self._show(stage, done, total)

    def taken(self) -> str:
        """Return a line with the number of rounds and their time."""
        return f"searched in {_counted(len(self._stages), 'round')}, {time.monotonic() - self._began:.0f} s"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


LEGEND = (
    "{measure}: value on the queries of the search.",
    "held out: value on other queries, where the target must hold too. {beside} is measured on these queries, too.",
    "Recall: share of the oracle's best {reference} that is selected. Error: relative error of the attention output.",
    "kv fraction: share of the document's keys and values that is read, index included.",
)
TIGHTENED = "searched for: a stricter target, because the requested target did not hold on the held-out queries."


NEAR = 1.05
"""Ratio of errors up to which two settings count as equally exact."""


def least_error(tuned: list[Tuned], before: Tuned | None) -> Tuned:
    """Return the setting of least error, of all settings that meet the target and `before`, the default until now."""
    return min([*(one for one in tuned if one.holds), *([before] if before else [])], key=lambda one: one.error)


def error_ratio(tuned: list[Tuned], before: Tuned | None) -> float | None:
    """Return the error of the cheapest setting divided by the least error of a setting that meets the target.

    None if no setting meets the target, or if the least error is 0.
    """
    if not tuned[0].holds:
        return None
    least = least_error(tuned, before).error
    return tuned[0].error / least if least else None


def _error_line(tuned: list[Tuned], before: Tuned | None) -> list[str]:
    """Return a line with the ratio of errors, or no line if the ratio is at most NEAR or there is none."""
    ratio = error_ratio(tuned, before)
    if ratio is None or ratio <= NEAR:
        return []
    least = least_error(tuned, before)
    return [
        f"The cheapest setting has {ratio:.1f} times the error of {least.form.title} at {told_budget(least)}; "
        "--target-error bounds the error."
    ]


def record(
    artifact: Artifact, goal: Goal, tuned: list[Tuned], before: Tuned | None, defaults: Defaults | None
) -> dict[str, Any]:
    return {
        "index": str(artifact.folder),
        "recall_of": goal.reference.value,
        "tolerance": goal.tolerance,
        "default": None if defaults is None else defaults.model_dump(),
        "methods": [row(one) for one in tuned],
        "before": before and row(before),
        "error_ratio": error_ratio(tuned, before),
    }


def row(one: Tuned) -> dict[str, Any]:
    return {
        "method": one.form.name,
        "variant": one.form.variant,
        "parameters": asdict(one.form.method),
        "residual": one.form.residual,
        **{name: value for name, value in vars(one).items() if name != "form"},
    }


def told_budget(one: Tuned) -> str:
    return f"{100 * one.budget:.3g}%" + (" by layer" if one.layer_budgets else "")


def print_table(
    artifact: Artifact, goal: Goal, tuned: list[Tuned], before: Tuned | None, dense_ms: float | None, advice: str
) -> None:
    """Print the tuned settings as a table, with its legend and `advice` below."""
    show_fitting(tuned_table(artifact, goal, tuned, before, dense_ms), ("ms a layer's step", goal.beside))
    words = {"measure": goal.measure, "beside": goal.beside, "reference": goal.reference}
    tightened = [TIGHTENED] if any("searched for" in _said(one, goal, False) for one in tuned) else []
    say_wrapped([*_error_line(tuned, before), *(line.format(**words) for line in LEGEND), *tightened, advice])


def tuned_table(
    artifact: Artifact, goal: Goal, tuned: list[Tuned], before: Tuned | None, dense_ms: float | None
) -> Table:
    """Return the table of the tuned settings. A column has the time of a layer's step unless `dense_ms` is None."""
    timed = [] if dense_ms is None else ["ms a layer's step"]
    table = titled_table(
        f"{artifact.folder}: the cheapest with {goal}, held out within {goal.tolerance:g}",
        ["method"],
        ["budget", goal.measure, "held out", goal.beside, "kv fraction", *timed],
    )
    table.add_column("")
    for one in tuned:
        table.add_row(*_cells(one, goal, timed=bool(timed)), _said(one, goal, one is tuned[0]))
    if before is not None:
        table.add_section()
        holds = "" if before.holds else ", does not hold it"
        table.add_row(*_cells(before, goal, timed=bool(timed)), f"the default before{holds}")
    return table


def _cells(one: Tuned, goal: Goal, *, timed: bool) -> list[str]:
    step = ["" if one.step_ms is None else f"{one.step_ms:.3f}"] if timed else []
    figures = [f"{figure:.4f}" for figure in (one.calibration, one.held_out, getattr(one, goal.beside))]
    return [one.form.title, told_budget(one), *figures, f"{one.kv_fraction:.3f}", *step]


def _said(one: Tuned, goal: Goal, first: bool) -> str:
    if one.kv_fraction >= 1:
        return "reads everything"
    if not one.holds:
        return "does not hold it"
    tightened = f"searched for {one.aim:.4f}" if one.aim != goal.value else ""
    return ", ".join(part for part in ("cheapest" if first else "", tightened) if part)


if TYPE_CHECKING:  # the module imports transformers, which only --cheapest time needs
    from sparsekv.runtime.benchmark.layer_timer import SettingTimes

CHEAPEST = ("rows", "time")
RUNS = 20
"""Number of timed runs per step."""

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Command-line options of `tune`."""

    ctx: typer.Context
    index: IndexOption = None
    target_recall: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            parser=share,
            help="Select at least this share of the oracle's best tokens, such as 0.9 or 90%.",
        ),
    ] = None
    target_error: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", parser=share, help="Largest relative error of the attention output, such as 0.05 or 5%."
        ),
    ] = None
    target_perplexity: Annotated[
        float | None,
        typer.Option(
            metavar="RATIO",
            help="Largest ratio of the perplexity on the tail to that of dense attention, such as 1.02.",
        ),
    ] = None
    of: Annotated[
        str | None,
        typer.Option(
            metavar="BUDGET",
            help=f"Share or number of the document's tokens that the oracle selects, for recall. Default: {REFERENCE}.",
        ),
    ] = None
    method: Annotated[
        list[str] | None,
        typer.Option(help="Method to tune; repeatable. Default: all that can run.", autocompletion=names_of(methods)),
    ] = None
    cheapest: Annotated[
        str,
        typer.Option(
            metavar="|".join(CHEAPEST),
            help=(
                "Cost to minimise: the keys and values that a step reads (rows), or a step's time, measured on "
                "this machine over the index's middle layer (time)."
            ),
        ),
    ] = CHEAPEST[0]
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Search, but leave the index as it is.")] = False
    reset: Annotated[bool, typer.Option("--reset", help="Do not search; remove the index's default.")] = False
    model: ModelOption = None
    weights: WeightsOption = "auto"
    format: TableOptions
    run: RunOptions

    @property
    def targets(self) -> list[float]:
        """Values of the target options that are set."""
        given = self.target_recall, self.target_error, self.target_perplexity
        return [target for target in given if target is not None]

    def check(self) -> None:
        """Raise UsageError unless exactly one target is given, and for an unknown value of --cheapest.

        Also raise it for options that exclude each other, and for options of the model without --target-perplexity.
        """
        self.format.check()
        if len(self.targets) != 1:
            raise UsageError("give one target: --target-error 0.05, --target-recall 0.9 or --target-perplexity 1.02")
        for name in ("model", "dtype", "weights"):
            if on_command_line(self.ctx, name) and self.target_perplexity is None:
                told = f"--{name} {self.ctx.params[name]}"
                raise UsageError(f"{told} has no effect: only --target-perplexity runs a model; leave out --{name}")
        if self.cheapest not in CHEAPEST:
            raise UsageError(f"--cheapest {self.cheapest}: {choose_one(self.cheapest, CHEAPEST)}")

    def goal(self, artifact: Artifact) -> Goal:
        """Return the goal of the search. Raises UsageError for an invalid value of --of, and the errors of the goal."""
        (target,), reference = self.targets, REFERENCE if self.of is None else Budget.parse(self.of, "--of")
        if self.target_recall is not None:
            return RecallGoal(target, reference)
        if self.target_error is not None:
            return ErrorGoal(target, reference)
        from sparsekv.cli.common.loading import load_for  # the module imports transformers

        named = self.model, self.run.device, self.run.dtype
        open_model = partial(load_for, artifact, *named, quiet=self.run.quiet, weights=self.weights)
        return PerplexityGoal(target, reference, open_model=open_model)


@app.command(cls=Command)
@with_options(TuneOptions)
def tune(options: TuneOptions) -> None:
    """Find each method's cheapest setting that meets a target, and make the cheapest of these the index's default.

    The cheapest setting is the one that reads the fewest keys and values. With --cheapest time it is the fastest one on
    this machine: among each method's settings that meet the target and read least, the time of a step is measured.
    Neither way counts right answers, which `eval` does. Settings are searched on one half of the document's tail and
    verified on the other half. If a setting misses the target there, the search is repeated with a stricter target. The
    search takes some 20 rounds: minutes on a CPU, and less with fewer --method. `generate` uses the default when it is
    given no --method, --budget, --residual or option of a method. Only --target-perplexity runs the model, and takes
    --model, --dtype and --weights. docs/reference/measures.md explains the words.

    \b
    sparsekv tune --index manual.skv --target-recall 0.9
    sparsekv tune --index manual.skv --target-recall 0.8 --cheapest time
    sparsekv tune --index manual.skv --target-error 0.05 --method squeezed --method quest --dry-run
    sparsekv tune --index manual.skv --target-perplexity 1.02 --method squeezed
    """
    if options.reset:
        return _reset(options, open_artifact(options.index))
    options.check()
    artifact = open_artifact(options.index, thorough=True)
    if not options.dry_run:
        # Checked first: the search takes minutes.
        refuse_unwritable(artifact.folder, "get permission, or only measure, with --dry-run")
    goal = options.goal(artifact)
    search = _search(options, artifact, goal)
    target = goal.target().model_copy(update={"methods": [one for one in options.method or [] if one != "all"]})
    defaults = _defaults(search.cheapest, target) if search.cheapest.holds else None
    # Write the default before printing anything: after minutes of search, the reader of stdout may be gone.
    unwritten = None if defaults is None or options.dry_run else _keep(options, artifact, search, defaults)
    if options.format.as_json:
        found = {
            **record(artifact, goal, search.tuned, search.before, defaults),
            "target": target.model_dump(),
            "dense_step_ms": search.dense_ms,
        }
        say(json.dumps(found, indent=1))
    elif options.format.markup:
        say_markup(tuned_table(artifact, goal, search.tuned, search.before, search.dense_ms), options.format.markup)
    else:
        advice = _advice(options, artifact, search, kept=defaults is not None)
        print_table(artifact, goal, search.tuned, search.before, search.dense_ms, advice)
    if defaults is None:
        raise SparsekvError(
            f"no setting that reads less than the whole document reaches --target-{goal.measure} "
            f"{goal.value:g}; choose an easier target or another method"
        )
    if unwritten is not None:
        raise unwritten


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        tuned: one setting per method. Settings that meet the target come first, the cheapest of them at the front.
        before: the setting that was the default before the search, measured too. None if the default was dense
            attention, or if it cannot run.
        dense_ms: milliseconds of one layer's step of dense attention; None if no times were compared.
    """

    tuned: list[Tuned]
    before: Tuned | None
    dense_ms: float | None

    @property
    def cheapest(self) -> Tuned:
        return self.tuned[0]


def _search(options: TuneOptions, artifact: Artifact, goal: Goal) -> Search:
    """Search for the cheapest settings that meet the goal. Raises the errors of `runtime.tuning.tune`."""
    where, names = choose_device(options.run.device), options.method or []
    times = _times(artifact, where) if options.cheapest == "time" else None
    ahead, quiet = cost_ahead(artifact, goal, names), options.run.quiet
    with progress(quiet=quiet) as tell:
        time, rounds = None if times is None else times.sparse, Rounds(tell, partial(note, ahead, quiet=quiet))
        tuned, before = find(artifact, goal, names, rounds.show, where, time, _present(artifact))
    note(rounds.taken(), quiet=quiet)
    return Search(tuned, before, None if times is None else times.dense())


def _times(artifact: Artifact, where: torch.device) -> "SettingTimes":
    from sparsekv.runtime.benchmark.layer_timer import SettingTimes  # the module imports transformers

    return SettingTimes(artifact, clock_for(where, RUNS, cold=True))


def _keep(options: TuneOptions, artifact: Artifact, search: Search, defaults: Defaults) -> SparsekvError | None:
    """Make the cheapest setting the index's default and print a note. Returns the error if the default cannot be
    written, and None otherwise."""
    try:
        write_defaults(artifact.folder, artifact.manifest, defaults)
    except SparsekvError as error:
        return error
    cheapest = search.cheapest
    note(
        (
            f"{artifact.folder}: {cheapest.form.title} at {told_budget(cheapest)} is the default "
            f"now{_instead_of(search.before, cheapest)}; tune --reset removes it"
        ),
        quiet=options.run.quiet,
    )
    return None


def _advice(options: TuneOptions, artifact: Artifact, search: Search, *, kept: bool) -> str:
    """Return the text below the table: how settings were compared, and what else measures their quality."""
    told = f" Right answers are measured with {_eval_hint(artifact, search.cheapest)}." if kept else ""
    of_recall = options.target_recall is not None
    unseen = " Recall does not count what centroids represent; --target-error does." if of_recall else ""
    return f"{_what_is_cheap(search.dense_ms)}{unseen}{told}"


def _reset(options: TuneOptions, artifact: Artifact) -> None:
    others = [one for one in options.ctx.command.params if one.name not in ("index", "reset", "quiet")]
    if unused := [f"--{long_name(one)}" for one in others if on_command_line(options.ctx, str(one.name))]:
        raise UsageError(f"--reset only removes the index's default; leave {' and '.join(unused)} out")
    refuse_unwritable(artifact.folder, "get permission to write there")
    write_defaults(artifact.folder, artifact.manifest, None)
    had = "no default of its own now" if artifact.manifest.defaults else "no default of its own, as before"
    note(f"{artifact.folder} has {had}", quiet=options.run.quiet)


def _defaults(cheapest: Tuned, target: TuneTarget) -> Defaults:
    return Defaults(
        method=cheapest.form.name,
        variant=cheapest.form.variant,
        parameters=asdict(cheapest.form.method),
        budget=cheapest.budget,
        layer_budgets=cheapest.layer_budgets,
        residual=cheapest.form.residual,
        target=target,
        calibration=cheapest.calibration,
        held_out=cheapest.held_out,
        kv_fraction=cheapest.kv_fraction,
    )


def _present(artifact: Artifact) -> DecodeConfig | None:
    """Return the config that answers used before the search. None if it can no longer run, such as a default of `tune`
    with a method that is not installed."""
    try:
        return choose_config(artifact)
    except SparsekvError:
        return None


def _instead_of(before: Tuned | None, cheapest: Tuned) -> str:
    if before is None or (before.form, before.budget) == (cheapest.form, cheapest.budget):
        return ""
    better = ", which holds the target too and costs less" if before.holds and before.cost < cheapest.cost else ""
    return f" instead of {before.form.title} at {told_budget(before)}{better}"


def _what_is_cheap(dense_ms: float | None) -> str:
    if dense_ms is None:
        return "Cheapest: the fewest keys and values read, not the shortest time (--cheapest time)."
    return f"Cheapest: the least time of a step of one layer, here; dense attention takes {dense_ms:.3f} ms."


def _eval_hint(artifact: Artifact, cheapest: Tuned) -> str:
    budget = f"{100 * cheapest.budget:.3g}%"
    options = ["--method", cheapest.form.name, "--budget", budget, *form_options(cheapest.form)]
    alike = ", with one budget for all layers" if cheapest.layer_budgets else ""
    return eval_hint(artifact.folder, artifact.manifest, *options) + alike
