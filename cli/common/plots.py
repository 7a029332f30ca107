"""Plots of a clustering and of posting lists, and what all plots share."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, MaxNLocator, PercentFormatter

from sparsekv.cli.common.printable import printable
from sparsekv.formats.errors import SparsekvError
from sparsekv.runtime.selection.list_statistics import ListShape

matplotlib.rcParams["text.parse_math"] = False  # a `$` in a name is a dollar


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


def by_layer(figure: Figure, axis: Axes, values: np.ndarray, layers: list[int], what: str) -> None:
    """Draw values [layers, columns] as an image with a row per layer, and a bar that says what they are."""
    image = axis.imshow(values, aspect="auto", cmap="viridis")
    step = max(1, len(layers) // 15)
    axis.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axis.set_ylabel("layer")
    figure.colorbar(image, ax=axis, label=what, format=PercentFormatter(1, decimals=None))


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
    shares = np.array([one.subspace_shares for one in lists.values()])
    by_layer(figure, right, shares, list(lists), "share of the logits' deviation over keys")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_xlabel("subspace")
    right.set_title("share of each subspace", fontsize="medium")
    figure.suptitle(title)
    save(figure, path)
