"""Pictures of timed steps: speed-up against context, and time against bytes beside what a copy takes."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from sparsekv.cli.common.plots import MARKERS, save
from sparsekv.runtime.benchmark.rows import Row
from sparsekv.runtime.selection.budget import Budget


def plot_steps(rows: Sequence[Row], copy_bandwidth: float, title: str, path: Path) -> None:
    """One line for each method, budget and batch.

    Args:
        copy_bandwidth: bytes a second.

    Raises:
        SparsekvError: the picture cannot be written.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6), layout="constrained")
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.context):
        lines.setdefault(_label(row, several_batches=len({row.batch for row in rows}) > 1), []).append(row)
    colours = plt.get_cmap("tab20")
    for number, (label, some) in enumerate(lines.items()):
        look = {"marker": MARKERS[number % len(MARKERS)], "color": colours(number % 20), "alpha": 0.85}
        left.plot([row.context for row in some], [row.speedup for row in some], label=label, **look)
        right.plot([row.bytes for row in some], [row.median_ms for row in some], **look)
    left.axhline(1, color="black", linestyle="--", linewidth=1)
    left.set_xlabel("tokens of context")
    left.set_ylabel("times as fast as the fastest dense attention")
    contexts = sorted({row.context for row in rows})
    left.set_xscale("log", base=2)
    left.set_xticks(contexts, [f"{context / 1024:g}K" for context in contexts])
    left.xaxis.set_minor_formatter(NullFormatter())
    _roofline(right, rows, copy_bandwidth)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title)
    save(figure, path)


def _roofline(axis: Axes, rows: Sequence[Row], copy_bandwidth: float) -> None:
    read = np.array([min(row.bytes for row in rows) / 2, max(row.bytes for row in rows) * 2])
    axis.plot(read, 1000 * read / copy_bandwidth, color="black", linestyle="--", linewidth=1)
    axis.annotate("a copy's bandwidth", (read[0], 1000 * read[0] / copy_bandwidth), fontsize="small", va="top")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("MB that a step must read")
    axis.set_ylabel("ms a step")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e6:g}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _label(row: Row, *, several_batches: bool) -> str:
    budget = "" if row.budget is None else f" {Budget(row.budget)}"
    return row.name + budget + (f", batch {row.batch}" if several_batches else "")
