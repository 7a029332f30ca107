"""Plots of a recall report, of a clustering and of posting lists."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, MaxNLocator, PercentFormatter

from sparsekv.cli.common.plot_styles import form_numbers, in_percent, style_of
from sparsekv.cli.common.printable import printable
from sparsekv.formats.errors import SparsekvError
from sparsekv.runtime.reporting.report import RecallReport, RecallRow
from sparsekv.runtime.selection.list_statistics import ListShape
from sparsekv.runtime.selection.registry import methods

matplotlib.rcParams["text.parse_math"] = False  # a `$` in a name is a dollar

SHOWN_SHARE = 0.05  # the heat map shows recall at the measured budget nearest to this


def plot_recall(report: RecallReport, path: Path) -> None:
    """Plot recall and output error against KV read, a line per method, and recall by layer and head.

    Raises:
        SparsekvError: the picture cannot be written.
    """
    figure, axes = plt.subplots(1, 3, figsize=(16, 5.6), layout="constrained", width_ratios=(1, 1, 0.8))
    _lines(axes[0], report, "recall", "recall of the oracle's tokens")
    _lines(axes[1], report, "output_error", "relative error of the attention output")
    axes[1].set_yscale("log")
    in_percent(axes[0].yaxis)
    in_percent(axes[1].yaxis, logarithmic=True)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    _heat_map(figure, axes[2], report)
    figure.suptitle(f"{report.model} on {Path(report.index).name}: {report.n_middle:,} indexed tokens")
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure and close it; SparsekvError if the file cannot be written."""
    for text in figure.findobj(Text):
        text.set_text(printable(text.get_text()))
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SparsekvError(f"cannot write the plot {path}: {reason}; give --plot another name") from None
    except ValueError as error:
        raise SparsekvError(f"cannot write the plot {path}: {error}") from None
    finally:
        plt.close(figure)


def _log_scale(axis: Axes) -> None:
    """Make y logarithmic with plain numbers as labels: powers of ten would need math text."""
    axis.set_yscale("log")
    for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        which(LogFormatter(minor_thresholds=(2, 0.5)))


def _lines(axis: Axes, report: RecallReport, measure: str, label: str) -> None:
    lines: dict[tuple[str, str], list[RecallRow]] = {}
    averaged = report.by()
    sharing = len({row.together for row in averaged}) > 1
    for row in averaged:
        lines.setdefault((row.method, _form_and_budget(row) if sharing else row.name), []).append(row)
    forms = form_numbers(lines)
    for line, rows in lines.items():
        method, name = line
        rows = sorted(rows, key=lambda row: row.kv_fraction)
        x, y = [row.kv_fraction for row in rows], [getattr(row, measure) for row in rows]
        axis.plot(x, y, label=name, **style_of(method, forms[line]))
        for row, place in zip(rows, zip(x, y, strict=True), strict=True) if sharing else ():
            axis.annotate(str(row.together), place, xytext=(4, 4), textcoords="offset points", fontsize="small")
    whose = "\nonce for the number of queries beside each point" if sharing else ""
    axis.set_xlabel(f"keys and values read, as a share of dense attention's{whose}")
    axis.set_ylabel(label)
    in_percent(axis.xaxis)
    axis.grid(alpha=0.3)


def _heat_map(figure: Figure, axis: Axes, report: RecallReport) -> None:
    """Draw recall by layer and KV head of the first method that has an index, or of the first one if none has."""
    shown = _shown(report)
    rows = [row for row in report.by("layer", "kv_head") if _line(row) == _line(shown)]
    layers = sorted({row.layer for row in rows if row.layer is not None})
    heads = sorted({row.kv_head for row in rows if row.kv_head is not None})
    recall = np.full((len(layers), len(heads)), np.nan)
    for row in rows:
        assert row.layer is not None
        assert row.kv_head is not None
        recall[layers.index(row.layer), heads.index(row.kv_head)] = row.recall
    _by_layer(figure, axis, recall, layers, "recall")
    axis.set_xticks(range(len(heads)), [str(head) for head in heads])
    axis.set_xlabel("KV head")
    one = ", one query alone" if any(row.together > 1 for row in report.rows) and shown.together == 1 else ""
    axis.set_title(f"recall of {shown.name} at {shown.budget_tokens:,} tokens{one}", fontsize="medium")


def _by_layer(figure: Figure, axis: Axes, values: np.ndarray, layers: list[int], what: str) -> None:
    """Draw values [layers, columns] as an image with a row per layer, and a bar that says what they are."""
    image = axis.imshow(values, aspect="auto", cmap="viridis")
    step = max(1, len(layers) // 15)
    axis.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axis.set_ylabel("layer")
    figure.colorbar(image, ax=axis, label=what, format=PercentFormatter(1, decimals=0))


def _form_and_budget(row: RecallRow) -> str:
    return " ".join(part for part in (row.method, row.variant, f"at {row.budget_tokens:,} tokens") if part)


def _line(row: RecallRow) -> tuple[Any, ...]:
    return row.method, row.variant, row.together, row.budget, row.budget_tokens


def _shown(report: RecallReport) -> RecallRow:
    known = methods()

    def distance(row: RecallRow) -> tuple[bool, float]:
        return not known[row.method].needs_index, abs(row.budget_tokens / report.n_middle - SHOWN_SHARE)

    return min(report.by(), key=distance)


def plot_clusters(layers: list[int], sizes: list[np.ndarray], title: str, path: Path) -> None:
    """Plot quantiles of each layer's cluster sizes, and the distribution of sizes over all layers.

    Args:
        sizes: tokens in each cluster, one array per layer.

    Raises:
        SparsekvError: the picture cannot be written.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    filled = [size[size > 0] for size in sizes]
    for quantile, name in ((1.0, "max"), (0.99, "p99"), (0.5, "median"), (0.0, "min")):
        left.plot(layers, [np.quantile(size, quantile) for size in filled], marker="o", markersize=3, label=name)
    _log_scale(left)
    left.set_xlabel("layer")
    left.set_ylabel("tokens in a cluster")
    left.legend()
    left.grid(alpha=0.3)
    everything = np.concatenate(filled)
    right.hist(everything, bins=40)
    _log_scale(right)
    right.set_xlabel("tokens in a cluster")
    right.set_ylabel("clusters, all layers")
    figure.suptitle(title)
    save(figure, path)


def plot_lists(lists: dict[int, ListShape], title: str, path: Path) -> None:
    """Plot how much each subspace decides the keys' ranking, by rank (CSAttention's figure 1c) and by layer.

    Args:
        lists: the shares of each layer, by its number.

    Raises:
        SparsekvError: the picture cannot be written.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    ranked = np.array([one.ranked_shares for one in lists.values()])
    ranks = np.arange(1, ranked.shape[1] + 1)
    for number, one in enumerate(ranked):
        left.plot(ranks, one, color="grey", alpha=0.3, linewidth=1, label="" if number else "one layer")
    left.plot(ranks, ranked.mean(0), marker="o", label="mean of the layers")
    left.axhline(1 / len(ranks), linestyle="--", color="black", label="even share")
    left.set_ylim(bottom=0)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_xlabel("subspace of a query, by rank")
    left.set_ylabel("share of the logits' deviation over keys")
    left.legend()
    left.grid(alpha=0.3)
    _by_layer(figure, right, np.array([one.subspace_shares for one in lists.values()]), list(lists), "share")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_xlabel("subspace")
    right.set_title("share of each subspace", fontsize="medium")
    figure.suptitle(title)
    save(figure, path)
