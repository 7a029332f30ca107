"""Labels at the ends of a plot's lines, in a column beside it where they do not lie on one another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

COLUMN = 1.05
"""Where labels begin, in widths of the axes."""
HIGHEST = 0.04
"""The distance of labels where there is room, in heights of the axes."""
DARKER = 0.7


@dataclass(frozen=True)
class LineEnd:
    """The last point of a line, in data, with the line's name and colour."""

    name: str
    x: float
    y: float
    colour: Any


def label_ends(axis: Axes, ends: Sequence[LineEnd]) -> None:
    """Write each line's name to the right of the axes, near the height of its end, with a thin line to it.

    Scales and limits of the axes must be final.
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
    """Heights near the given ones and in their order, from 0 to 1, no two nearer than there is room for."""
    gap = min(HIGHEST, 1 / max(1, len(heights) - 1))
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    placed = [0.0] * len(heights)
    below = -gap
    for number in order:
        placed[number] = below = max(heights[number], below + gap)
    above = 1 + gap
    for number in reversed(order):
        placed[number] = above = min(placed[number], above - gap)
    return placed
