"""Show the cost of a search by `tune`, and its result as JSON and as a table."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.table import Table

from sparsekv.cli.common.console import say_wrapped
from sparsekv.cli.common.tables import show_fitting, titled_table
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import Defaults
from sparsekv.runtime.tuning.coarse_search import candidates
from sparsekv.runtime.tuning.goals import Goal, Progress, Tuned


def cost_ahead(artifact: Artifact, goal: Goal, names: list[str]) -> str:
    """Return a line with the numbers of variants, methods and layers that a search will measure.

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
        begin: called just before the first round is shown. The goal's model is loaded by then, which could have failed.
    """

    def __init__(self, show: Progress, begin: Callable[[], None]):
        self._show, self._begin, self._stages, self._began = show, begin, set[str](), 0.0

    def show(self, stage: str, done: int, of: int) -> None:
        """Show a round's progress."""
        if not self._stages:
            self._begin()
            self._began = time.monotonic()
        self._stages.add(stage)
        self._show(stage, done, of)

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
    """Return the setting of least error among those that meet the target and `before`, the index's default so far."""
    return min([*(one for one in tuned if one.holds), *([before] if before else [])], key=lambda one: one.error)


def error_ratio(tuned: list[Tuned], before: Tuned | None) -> float | None:
    """Return the error of the cheapest setting, divided by the least error. None if no setting meets the target, or if
    the least error is 0."""
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
