"""Plot timed steps: speed-up against context length or number of questions, and time against bytes read."""

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from sparsekv.cli.common.plots import form_numbers, save, style_of
from sparsekv.runtime.benchmark.layer_timer import StepTiming
from sparsekv.runtime.selection.interface import Budget


def plot_steps(rows: Sequence[StepTiming], copy_bandwidth: float, title: str, path: Path, *, shared: bool) -> None:
    """Plot speed-up against context length, and time against bytes read, with a line for each method, budget and batch.

    With `shared`, speed-up is plotted against the number of questions, with a line for each method, budget and context
    length. Dashed lines show a speed-up of 1, and the time of a memory copy.

    Args:
        copy_bandwidth: bandwidth of a memory copy in bytes per second.
        shared: whether the rows are of several questions over one document.

    Raises:
        SparsekvError: the picture cannot be written.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6), layout="constrained")
    lines: dict[tuple[str, str], list[StepTiming]] = {}
    size, other = map(attrgetter, ("batch", "context") if shared else ("context", "batch"))
    several = len({other(row) for row in rows}) > 1
    for row in sorted(rows, key=size):
        budget = "" if row.budget is None else f" {Budget(row.budget)}"
        beside = "" if not several else f", {_in_k(row.context)} tokens" if shared else f", batch {row.batch}"
        lines.setdefault((row.method, row.name + budget + beside), []).append(row)
    forms = form_numbers(lines)
    for (method, label), some in lines.items():
        look = style_of(method, forms[method, label])
        left.plot([size(row) for row in some], [row.speedup for row in some], label=label, **look)
        right.plot([row.bytes for row in some], [row.median_ms for row in some], **look)
    left.axhline(1, color="black", linestyle="--", linewidth=1)
    left.set_xlabel("questions over one document" if shared else "tokens of context")
    left.set_ylabel("times as fast as the fastest dense attention")
    sizes = sorted({size(row) for row in rows})
    left.set_xscale("log", base=2)
    left.set_xticks(sizes, [_in_k(one) for one in sizes])
    left.xaxis.set_minor_formatter(NullFormatter())
    _roofline(right, rows, copy_bandwidth)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title)
    save(figure, path)


def _roofline(axis: Axes, rows: Sequence[StepTiming], copy_bandwidth: float) -> None:
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


def _in_k(size: int) -> str:
    """Format a size: as `128K` if it is a multiple of 1,024, otherwise in full."""
    return f"{size:,}" if size % 1024 else f"{size // 1024}K"
