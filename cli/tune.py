"""`sparsekv tune`: find the cheapest setting that meets a target, and make it the index's default."""

import json
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table

from sparsekv.cli.common.console import note, progress, say, show
from sparsekv.cli.common.index_option import open_artifact
from sparsekv.cli.common.loading import load_for
from sparsekv.cli.common.options import (
    DeviceOption,
    DtypeOption,
    IndexOption,
    JsonOption,
    ModelOption,
    QuietOption,
    names_of,
)
from sparsekv.cli.configuring.sources import on_command_line
from sparsekv.formats.defaults import refuse_unwritable, write_defaults
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.models.load import choose_device
from sparsekv.formats.reader import Artifact
from sparsekv.formats.schema import Defaults
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.registry import methods
from sparsekv.runtime.tuning.goals import REFERENCE, ErrorGoal, Goal, PerplexityGoal, RecallGoal
from sparsekv.runtime.tuning.tuned import Tuned
from sparsekv.runtime.tuning.tuning import tune as find

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def tune(
    ctx: typer.Context,
    index: IndexOption = None,
    target_recall: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Select at least this share of the oracle's best tokens, such as 0.9."),
    ] = None,
    target_error: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Largest relative error of the attention output, such as 0.05."),
    ] = None,
    target_perplexity: Annotated[
        float | None,
        typer.Option(
            metavar="RATIO", help="Largest ratio of perplexity on the tail to dense attention's, such as 1.02."
        ),
    ] = None,
    of: Annotated[
        str | None,
        typer.Option(
            metavar="BUDGET",
            help=f"Share or number of the document's tokens that the oracle selects, for recall. Default: {REFERENCE}.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Method to tune; repeatable. Default: all that can run.", autocompletion=names_of(methods)),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Search, but leave the index as it is.")] = False,
    model: ModelOption = None,
    as_json: JsonOption = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    quiet: QuietOption = False,
) -> None:
    """Find each method's cheapest setting that meets a target, and make the cheapest of all the index's default.

    The cheapest setting is the one that reads the fewest keys and values. Settings are searched on one half of the
    document's tail and verified on the other; if the other half misses the target, the search is repeated for a tighter
    one. `generate` uses the default when it is given no --method, --budget, --residual or option of a method. --model
    and --dtype are for --target-perplexity, which alone runs the model.

    \b
    sparsekv tune --index manual.skv --target-recall 0.9
    sparsekv tune --index manual.skv --target-error 0.05 --method squeezed --method quest --dry-run
    sparsekv tune --index manual.skv --target-perplexity 1.02 --method squeezed
    """
    if sum(target is not None for target in (target_recall, target_error, target_perplexity)) != 1:
        raise UsageError("give one target: --target-recall 0.9, --target-error 0.05 or --target-perplexity 1.02")
    if on_command_line(ctx, "model") and target_perplexity is None:
        raise UsageError(f"--model {model}: only --target-perplexity runs a model; leave it out")
    reference = REFERENCE if of is None else Budget.parse(of, "--of")
    artifact = open_artifact(index, thorough=True)
    if not dry_run:
        refuse_unwritable(artifact.folder)
    goal: Goal
    if target_recall is not None:
        goal = RecallGoal(target_recall, reference)
    elif target_error is not None:
        goal = ErrorGoal(target_error, reference)
    elif target_perplexity is not None:
        open_model = partial(load_for, artifact, model, device, dtype, quiet=quiet)
        goal = PerplexityGoal(target_perplexity, reference, open_model=open_model)
    with progress(quiet=quiet) as tell:
        tuned = find(artifact, goal, method or [], tell, choose_device(device))
    best = tuned[0]
    defaults = _defaults(best, goal) if best.holds else None
    if as_json:
        say(json.dumps(_record(artifact, goal, tuned, defaults), indent=1))
    else:
        _print_table(artifact, goal, tuned)
    if defaults is None:
        raise SparsekvError(
            f"no setting reads less than everything and holds --target-{goal.measure} {goal.value:g}; "
            "choose an easier target or another method"
        )
    if not dry_run:
        write_defaults(artifact.folder, artifact.manifest, defaults)
        note(f"{artifact.folder}: {best.form.title} at {_budget(best)} is the default now", quiet=quiet)


def _defaults(best: Tuned, goal: Goal) -> Defaults:
    return Defaults(
        method=best.form.name,
        variant=best.form.variant,
        parameters=asdict(best.form.method),
        budget=best.budget,
        layer_budgets=best.layer_budgets,
        residual=best.form.residual,
        target=goal.target(),
        calibration=best.calibration,
        held_out=best.held_out,
        kv_fraction=best.kv_fraction,
    )


def _record(artifact: Artifact, goal: Goal, tuned: list[Tuned], defaults: Defaults | None) -> dict[str, Any]:
    rows = [
        {
            "method": one.form.name,
            "variant": one.form.variant,
            "parameters": asdict(one.form.method),
            "residual": one.form.residual,
            **{name: value for name, value in vars(one).items() if name != "form"},
        }
        for one in tuned
    ]
    return {
        "index": str(artifact.folder),
        "target": goal.target().model_dump(),
        "recall_of": goal.reference.value,
        "tolerance": goal.tolerance,
        "default": None if defaults is None else defaults.model_dump(),
        "methods": rows,
    }


def _budget(one: Tuned) -> str:
    return f"{100 * one.budget:.3g}%" + (" by layer" if one.layer_budgets else "")


def _print_table(artifact: Artifact, goal: Goal, tuned: list[Tuned]) -> None:
    table = Table(
        title=f"{artifact.folder}: the cheapest with {goal}, held out within {goal.tolerance:g}",
        title_justify="left",
        title_style="",
    )
    table.add_column("method")
    for name in ("budget", goal.measure, "held out", f"its {goal.beside}", "KV read", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for one in tuned:
        table.add_row(
            one.form.title,
            _budget(one),
            f"{one.calibration:.4f}",
            f"{one.held_out:.4f}",
            f"{getattr(one, goal.beside):.4f}",
            f"{one.kv_fraction:.3f}",
            _said(one, goal, one is tuned[0]),
        )
    show(table)


def _said(one: Tuned, goal: Goal, first: bool) -> str:
    if not one.holds:
        return "does not hold it"
    tightened = f"searched for {one.aim:.4f}" if one.aim != goal.value else ""
    return ", ".join(part for part in ("best" if first else "", tightened) if part)
