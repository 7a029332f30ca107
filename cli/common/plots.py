"""Helpers for the plots of all commands: names at the ends of lines, a style for each method, writing the file.

Also the plots of clusters and of posting lists.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from sparsekv.cli.common.streams import printable
from sparsekv.formats.errors import SparsekvError, reason_of
from sparsekv.runtime.selection.cluster_statistics import ListShape
from sparsekv.runtime.selection.interface import DENSE, methods

COLUMN = 1.05
"""Horizontal position where labels begin, in widths of the axes."""
LABEL_GAP = 0.04
"""Vertical distance between labels if there is room, in heights of the axes."""
DARKER = 0.7


@dataclass(frozen=True)
class LineEnd:
    """The last point of a line in data coordinates, with the line's name and colour."""

    name: str
    x: float
    y: float
    colour: Any


def label_ends(axis: Axes, ends: Sequence[LineEnd]) -> None:
    """Write each line's name to the right of the axes, near the height of the line's last point.

    A thin line connects the name and the point.
    The scales and limits of the axes must be final.
    """
    to_axes = axis.transData + axis.transAxes.inverted()
    heights = [float(to_axes.transform((end.x, end.y))[1]) for end in ends]
    for end, height in zip(ends, spread(heights), strict=True):
        dark = [DARKER * part for part in to_rgb(end.colour)]
        axis.annotate(
            end.name,
            (end.x, end.y),
            xytext=(COLUMN, height),
            textcoords="axes fraction",
            verticalalignment="center",
            fontsize="small",
            color=dark,
            arrowprops={
                "arrowstyle": "-",
                "color": dark,
                "alpha": 0.45,
                "linewidth": 0.7,
                "relpos": (0, 0.5),
                "shrinkB": 3,
            },
            annotation_clip=False,
        )


def spread(heights: Sequence[float]) -> list[float]:
    """Move labels apart: return heights (0 to 1) near the given ones, in their order, and at least LABEL_GAP apart.

    If there is no room for this distance, the heights are evenly spaced.
    """
    gap = min(LABEL_GAP, 1 / max(1, len(heights) - 1))
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    placed = [0.0] * len(heights)
    below = -gap
    for number in order:
        placed[number] = below = max(heights[number], below + gap)
    above = 1 + gap
    for number in reversed(order):
        placed[number] = above = min(placed[number], above - gap)
    return placed


MARKERS = "osD^vPX*<>"
LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
COMPARED_WITH = {
    DENSE: {"color": "black", "marker": "s"},
    "oracle": {"color": "dimgrey", "marker": "+"},
    "window": {"color": "darkgrey", "marker": "x"},
}
"""Styles of dense attention, the oracle and the window, in black and greys. No other method has these colours."""


def style_of(method: str, form: int) -> dict[str, Any]:
    """Return matplotlib keywords for a line.

    The method determines colour and marker, which are the same in every plot. `form`, the index of the method's
    variant, determines the dashes.

    Besides dense attention, oracle and window, up to 38 methods get different colours, and up to six variants of a
    method different dashes.

    Raises:
        ValueError: there is no such method.
    """
    look = COMPARED_WITH.get(method)
    if look is None:
        place = [name for name in methods() if name not in COMPARED_WITH].index(method)
        colours = _colours()
        look = {"color": colours[place % len(colours)], "marker": MARKERS[place % len(MARKERS)]}
    return look | {"linestyle": LINES[form % len(LINES)], "alpha": 0.9}


def _colours() -> list[Any]:
    """Return tab20's colours without its greys, followed by those of tab20b. All dark colours of tab20 come before the
    light colours, which look like them."""
    tab20, tab20b = (colormaps[name].colors for name in ("tab20", "tab20b"))  # type: ignore[attr-defined]
    pairs = [(number, colour) for number, colour in enumerate(tab20) if number // 2 != 7]
    return [*(colour for number, colour in sorted(pairs, key=lambda pair: pair[0] % 2)), *tab20b]


def form_numbers(lines: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Return the index of each line's variant among the variants of its method.

    A line is a method and the name of a variant.
    """
    numbers: dict[tuple[str, str], int] = {}
    for method, form in lines:
        numbers.setdefault((method, form), sum(known == method for known, _ in numbers))
    return numbers


def in_percent(axis: Axis, *, logarithmic: bool = False) -> None:
    """Label an axis of shares in percent. A logarithmic axis gets labels at 1, 2 and 5 of each power of ten."""
    if not logarithmic:
        axis.set_major_formatter(PercentFormatter(1, decimals=None))
        return
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    axis.set_minor_formatter(NullFormatter())


matplotlib.use("Agg")

matplotlib.rcParams["text.parse_math"] = False  # a `$` in a name is a dollar sign, not math text


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file and close the figure. Raises SparsekvError if the file cannot be written."""
    for text in figure.findobj(Text):
        text.set_text(printable(text.get_text()))
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise SparsekvError(f"cannot write the plot {path}: {reason_of(error)}; give --plot another name") from None
    except ValueError as error:
        raise SparsekvError(
            f"cannot write the plot {path}: {error}; give --plot another ending, such as .svg"
        ) from None
    finally:
        plt.close(figure)


def _log_scale(axis: Axes) -> None:
    """Make the y axis logarithmic, with plain numbers as labels: powers of ten would need math text, which is off."""
    axis.set_yscale("log")
    for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        which(LogFormatter(minor_thresholds=(2, 0.5)))


def by_layer(figure: Figure, axis: Axes, values: np.ndarray, layers: list[int], what: str) -> None:
    """Draw values [layers, columns] as an image with a row per layer. Its colour bar has the label `what`."""
    image = axis.imshow(values, aspect="auto", cmap="viridis")
    step = max(1, len(layers) // 15)
    axis.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axis.set_ylabel("layer")
    figure.colorbar(image, ax=axis, label=what, format=PercentFormatter(1, decimals=None))


def plot_clusters(layers: list[int], sizes: list[np.ndarray], title: str, path: Path) -> None:
    """Plot quantiles of each layer's cluster sizes, and the distribution of sizes over all layers.

    Args:
        sizes: number of tokens in each cluster, one array per layer.

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
    """Plot how much of the keys' ranking each subspace decides.

    The left plot sorts the subspaces of each query by their share (CSAttention's figure 1c). The right plot has the
    shares of each layer.

    Args:
        lists: facts about each layer's posting lists, by layer index.

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
