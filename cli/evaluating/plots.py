"""Plot an evaluation: scores against the KV fraction, and scores of tasks with a depth by length and depth."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sparsekv.cli.common.plots import form_numbers, in_percent, save, style_of
from sparsekv.runtime.evaluation.table import Cell, Score
from sparsekv.runtime.selection.interface import Budget

Line = tuple[str, str, str]


def plot_scores(rows: Sequence[Score], cells: Sequence[Cell], title: str, path: Path) -> None:
    """Plot scores against the KV fraction, one panel for each task, length and metric.

    A line has the scores of a method's variant after one prefill, with confidence intervals. Dense attention is a
    dashed line with its interval as a band. Scores of single turns are left out. Below the scores, `cells` are drawn as
    maps of length by depth, one for each task, method, variant, budget and prefill.

    Raises:
        SparsekvError: the picture cannot be written.
    """
    groups: dict[tuple[str, int | None, str], list[Score]] = {}
    for row in (one for one in rows if one.turn is None):
        groups.setdefault((row.task, row.length, row.metric), []).append(row)
    maps = _maps(cells)
    columns = max(len(groups), min(len(maps), 5))
    below = -(-len(maps) // columns)
    figure, axes = plt.subplots(
        1 + below, columns, figsize=(max(8, 4.5 * columns), 5 + 3 * below), layout="constrained", squeeze=False
    )
    for axis in axes.flat:
        axis.axis("off")
    for axis, group in zip(axes[0], groups.values(), strict=False):
        _lines(axis, group)
    for axis, (name, some) in zip(axes[1:].flat, maps.items(), strict=False):
        _map(figure, axis, name, some)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title)
    save(figure, path)


def _read(row: Score) -> float:
    return row.kv_fraction or 0.0


def _bounds(row: Score) -> tuple[float, float]:
    """Return the bounds of a score's interval. Without an interval both are the score."""
    return (
        (row.score, row.score) if row.score_low is None or row.score_high is None else (row.score_low, row.score_high)
    )


def _lines(axis: Axes, rows: list[Score]) -> None:
    axis.axis("on")
    dense = next((row for row in rows if row.difference is None), None)
    if dense is not None:
        axis.axhline(dense.score, color="black", linestyle="--", linewidth=1, label="dense attention")
        axis.axhspan(*_bounds(dense), color="black", alpha=0.08)
    lines: dict[Line, list[Score]] = {}
    for row in (one for one in rows if one is not dense):
        lines.setdefault((row.prefill, row.method, row.variant), []).append(row)
    several = len({row.prefill for row in rows}) > 1
    forms = form_numbers((method, f"{variant} {prefill}") for prefill, method, variant in lines)
    for (prefill, method, variant), some in lines.items():
        ordered = sorted((row for row in some if row.kv_fraction is not None), key=_read)
        score = np.array([row.score for row in ordered])
        ends = np.array([_bounds(row) for row in ordered]).T
        axis.errorbar(
            [_read(row) for row in ordered],
            score,
            yerr=np.abs(ends - score),
            label=" ".join(part for part in (method, variant, prefill if several else "") if part),
            capsize=2,
            **style_of(method, forms[method, f"{variant} {prefill}"]),
        )
    first = rows[0]
    axis.set_title(first.task if first.length is None else f"{first.task}, {first.length:,} tokens", fontsize="medium")
    axis.set_xlabel("keys and values read, as a share of dense attention's")
    axis.set_ylabel(f"{first.metric} {first.unit}".strip())
    axis.set_xlim(0, 1.05 * max([1.0, *map(_read, rows)]))
    in_percent(axis.xaxis)
    if first.unit == "%":
        axis.set_ylim(-2, 102)
    axis.grid(alpha=0.3)


def _maps(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Group cells by the title of their map: task, method, variant, budget and prefill."""
    maps: dict[str, list[Cell]] = {}
    for cell in cells:
        budget = "" if cell.budget is None else f" at {Budget(cell.budget)}"
        name = f"{cell.task}, {cell.method} {cell.variant}".strip() + f"{budget} ({cell.prefill} prefill)"
        maps.setdefault(name, []).append(cell)
    return maps


def _map(figure: Figure, axis: Axes, name: str, cells: list[Cell]) -> None:
    axis.axis("on")
    lengths = sorted({cell.length for cell in cells})
    depths = sorted({cell.depth for cell in cells})
    scores = np.full((len(depths), len(lengths)), np.nan)
    for cell in cells:
        scores[depths.index(cell.depth), lengths.index(cell.length)] = cell.score
    image = axis.imshow(scores, aspect="auto", cmap="viridis", vmin=0, vmax=100)
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
    axis.set_xlabel("tokens")
    axis.set_ylabel("depth")
    axis.set_title(name, fontsize="small")
    figure.colorbar(image, ax=axis, label="score")
