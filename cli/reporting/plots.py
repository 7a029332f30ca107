"""Plot a recall report: error and recall against the KV fraction, and recall by layer and head."""

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from sparsekv.cli.common.plots import LineEnd, by_layer, form_numbers, in_percent, label_ends, save, style_of
from sparsekv.runtime.reporting.report import RecallReport, RecallRow, pareto_front
from sparsekv.runtime.selection.interface import methods

SHOWN_SHARE = 0.05  # the heat map shows recall at the measured budget nearest to this share
SLIDE = (16, 9)  # inches
SHARES = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
"""Ticks of the axis of KV fractions. The axis is linear below the second tick, and logarithmic above."""


def plot_recall(report: RecallReport, path: Path) -> None:
    """Plot output error and recall against the KV fraction, with a line per method and variant, and recall by layer
    and head.

    Raises:
        SparsekvError: the picture cannot be written.
    """
    figure, axes = plt.subplots(1, 3, figsize=SLIDE, layout="constrained", width_ratios=(1, 1, 0.32))
    _scale_errors(axes[0], [row.output_error for row in report.by()])
    _lines(axes[0], report, "output_error", "relative error of the attention output (less is better)")
    _lines(axes[1], report, "recall", "recall of the oracle's tokens (more is better)")
    in_percent(axes[1].yaxis)
    _heat_map(figure, axes[2], report)
    figure.suptitle(f"{report.model} on {Path(report.index).name}: {report.n_middle:,} indexed tokens", fontsize=16)
    save(figure, path)


def _lines(axis: Axes, report: RecallReport, measure: str, label: str) -> None:
    averaged = report.by()
    sharing = len({row.together for row in averaged}) > 1
    if measure == "output_error" and not sharing:
        _front(axis, averaged)
    ends = []
    for (method, name), number in form_numbers((row.method, _name(row, sharing)) for row in averaged).items():
        rows = [row for row in averaged if (row.method, _name(row, sharing)) == (method, name)]
        rows = sorted(rows, key=lambda row: row.kv_fraction)
        x, y = [row.kv_fraction for row in rows], [getattr(row, measure) for row in rows]
        style = style_of(method, number)
        axis.plot(x, y, clip_on=False, **style)
        ends.append(LineEnd(name, x[-1], y[-1], style["color"]))
        for row, place in zip(rows, zip(x, y, strict=True), strict=True) if sharing else ():
            axis.annotate(str(row.together), place, xytext=(4, 4), textcoords="offset points", fontsize="small")
    whose = "\nonce for the number of queries beside each point" if sharing else ""
    axis.set_xlabel(f"keys and values read (kv fraction){whose}")
    axis.set_ylabel(label)
    _scale_reads(axis)
    axis.grid(alpha=0.3)
    label_ends(axis, ends)


def _front(axis: Axes, rows: list[RecallRow]) -> None:
    front = sorted(pareto_front(rows), key=lambda row: row.kv_fraction)
    x, y = [row.kv_fraction for row in front], [row.output_error for row in front]
    axis.plot(x, y, color="gold", alpha=0.5, linewidth=9, solid_capstyle="round", label="Pareto front")
    axis.legend(loc="lower left", frameon=False)


def _scale_errors(axis: Axes, errors: list[float]) -> None:
    """Make the y axis logarithmic. If some errors are 0, the axis is linear from 0 to the least error above 0."""
    if all(errors):
        axis.set_yscale("log")
        return in_percent(axis.yaxis, logarithmic=True)
    least = min(filter(None, errors), default=1.0)
    powers = range(math.floor(math.log10(least)), 1)
    ticks = [times * 10.0**power for power in powers for times in (1, 2, 5)]
    axis.set_yscale("symlog", linthresh=least, linscale=0.15)
    axis.set_ylim(0, 1.3 * max(least, *errors))
    axis.yaxis.set_major_locator(FixedLocator([0.0, *(tick for tick in ticks if tick >= least)]))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))


def _scale_reads(axis: Axes) -> None:
    """Make the x axis logarithmic from the first tick above 0 on, because most methods lie close together there."""
    axis.set_xscale("symlog", linthresh=SHARES[1], linscale=0.15)
    axis.set_xlim(left=0)
    axis.xaxis.set_major_locator(FixedLocator(SHARES))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))


def _name(row: RecallRow, sharing: bool) -> str:
    """Return the name of the line to which a row's point belongs.

    A line is a method's variant at all budgets. If the report compares numbers of queries that share a selection
    (`sharing`), a line is a variant at one budget, and its points are these numbers.
    """
    parts = (row.method, row.variant, f"at {row.budget_tokens:,} tokens") if sharing else (row.name,)
    return " ".join(part for part in parts if part)


def _heat_map(figure: Figure, axis: Axes, report: RecallReport) -> None:
    """Draw recall by layer and KV head for one method, at its budget nearest to SHOWN_SHARE of the indexed tokens.

    A method that needs an index is preferred; among several methods, the one with the nearest budget.
    """
    shown = _shown(report)
    rows = [row for row in report.by("layer", "kv_head") if _line(row) == _line(shown)]
    layers = sorted({row.layer for row in rows if row.layer is not None})
    heads = sorted({row.kv_head for row in rows if row.kv_head is not None})
    recall = np.full((len(layers), len(heads)), np.nan)
    for row in rows:
        assert row.layer is not None
        assert row.kv_head is not None
        recall[layers.index(row.layer), heads.index(row.kv_head)] = row.recall
    by_layer(figure, axis, recall, layers, "recall of the oracle's tokens")
    axis.set_xticks(range(len(heads)), [str(head) for head in heads])
    axis.set_xlabel("KV head")
    one = ", one query alone" if any(row.together > 1 for row in report.rows) and shown.together == 1 else ""
    axis.set_title(f"recall of {shown.name}\nat {shown.budget_tokens:,} tokens{one}", fontsize="medium")


def _line(row: RecallRow) -> tuple[Any, ...]:
    return row.method, row.variant, row.together, row.budget, row.budget_tokens


def _shown(report: RecallReport) -> RecallRow:
    known = methods()

    def distance(row: RecallRow) -> tuple[bool, float]:
        return not known[row.method].needs_index, abs(row.budget_tokens / report.n_middle - SHOWN_SHARE)

    return min(report.by(), key=distance)
