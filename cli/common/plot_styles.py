"""How a method looks in every plot: a colour and a marker of its own, and a line for each of its forms."""

from collections.abc import Iterable
from typing import Any

from matplotlib import colormaps
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from sparsekv.runtime.selection.registry import DENSE, methods

MARKERS = "osD^vPX*<>"
LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
COMPARED_WITH = {
    DENSE: {"color": "black", "marker": "s"},
    "oracle": {"color": "dimgrey", "marker": "+"},
    "window": {"color": "darkgrey", "marker": "x"},
}
"""Dense attention and the two bounds: in greys, which no other method has."""


def style_of(method: str, form: int) -> dict[str, Any]:
    """Keywords of a line: its colour and marker are the method's in every plot, its dashes the form's number's.

    Eighteen methods beside dense attention and the bounds look different from each other, and six forms of one.
    """
    ordered = [name for name in methods() if name not in COMPARED_WITH]
    place = ordered.index(method) if method in ordered else 0
    colours = _colours()
    own = {"color": colours[place % len(colours)], "marker": MARKERS[place % len(MARKERS)]}
    return COMPARED_WITH.get(method, own) | {"linestyle": LINES[form % len(LINES)], "alpha": 0.9}


def _colours() -> list[Any]:
    """tab20's without its greys, all dark ones before the light ones that look like them."""
    pairs = [(number, colour) for number, colour in enumerate(colormaps["tab20"].colors) if number // 2 != 7]  # type: ignore[attr-defined]
    return [colour for number, colour in sorted(pairs, key=lambda pair: pair[0] % 2)]


def form_numbers(lines: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Each line, a method and a form's name, with the form's number among those of its method."""
    numbers: dict[tuple[str, str], int] = {}
    for method, form in lines:
        numbers.setdefault((method, form), sum(known == method for known, _ in numbers))
    return numbers


def in_percent(axis: Axis, *, logarithmic: bool = False) -> None:
    """Label an axis of shares in percent; a logarithmic one at 1, 2 and 5 of each power of ten."""
    if not logarithmic:
        axis.set_major_formatter(PercentFormatter(1, decimals=None))
        return
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    axis.set_minor_formatter(NullFormatter())
