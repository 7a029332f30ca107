"""No two lines of a plot look the same, and a method looks the same in every plot."""

from itertools import product

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgb

from sparsekv.cli.common.plots import LINES, form_numbers, in_percent, style_of
from sparsekv.runtime.selection.interface import DENSE, methods


def test_methods_and_their_forms_look_different() -> None:
    drawn = [DENSE, *methods()]
    looks = [style_of(method, form) for method, form in product(drawn, range(len(LINES)))]
    assert len({tuple(map(str, look.values())) for look in looks}) == len(looks)
    colours = [str(style_of(method, 0)["color"]) for method in drawn]
    assert len(set(colours)) == len(colours)


def test_methods_of_packages_have_colours_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "norms", "y", "z"):
        monkeypatch.setitem(methods.known, name, methods()["quest"])
    test_methods_and_their_forms_look_different()


def test_a_methods_forms_are_counted_from_0() -> None:
    lines = [("codes", "codes"), ("quest", "quest"), ("codes", "codes without replacement"), ("codes", "codes")]
    assert list(form_numbers(lines).values()) == [0, 0, 1]


def test_shares_are_labelled_in_percent() -> None:
    figure, axis = plt.subplots()
    axis.plot([0.01, 0.3], [0.012, 0.4])
    axis.set_yscale("log")
    in_percent(axis.xaxis)
    in_percent(axis.yaxis, logarithmic=True)
    figure.canvas.draw()
    assert {"2%", "5%", "20%"} <= {label.get_text() for label in axis.get_yticklabels()}
    assert "10%" in {label.get_text().replace(".0", "") for label in axis.get_xticklabels()}
    plt.close(figure)


def test_greys_are_left_to_dense_attention_and_the_bounds() -> None:
    """However many methods plugins add: colours begin again with the first method's, in another shape."""
    greys = {name for name in [DENSE, *methods()] if len(set(to_rgb(style_of(name, 0)["color"]))) == 1}
    assert greys == {DENSE, "oracle", "window"}
