"""The picture of an evaluation: dense attention in a colour of its own, needle maps in one scale."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import same_color, to_rgb

from sparsekv.cli.evaluating import plots
from sparsekv.runtime.evaluation.table import Cell, Score
from sparsekv.runtime.selection.interface import methods

NO_DIFFERENCE: dict[str, Any] = dict.fromkeys(("difference", "difference_low", "difference_high", "same_as_dense"))


def _row(prefill: str, method: str, budget: float | None, score: float, read: float, **changes: Any) -> Score:
    about = {"task": "niah-single", "length": 600, "turn": None, "tokens": 600.0, "metric": "match-all", "unit": "%"}
    counted = {"contexts": 10, "questions": 40, "seconds": 1.0, "score_low": score - 5, "score_high": score + 5}
    differs = {"difference": -5.0, "difference_low": -9.0, "difference_high": 1.0, "same_as_dense": 80.0}
    values = about | counted | differs | changes
    return Score(prefill=prefill, method=method, variant="", budget=budget, score=score, kv_fraction=read, **values)


def _cell(method: str, score: float) -> Cell:
    return Cell("niah-single", 600, 0.25, "dense", method, "", None, 4, score)


ROWS = [
    _row("dense", "dense", None, 90.0, 1.0, **NO_DIFFERENCE),
    _row("dense", "codes", 0.05, 80.0, 0.1),
    _row("dense", "codes", 0.1, 85.0, 0.2),
    _row("quoka", "dense", None, 70.0, 1.0),
    _row("quoka", "codes", 0.05, 60.0, 0.1),
]


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[Score]], Any]]:
    """Draw rows, and needle maps of 100% and 50%, into a figure."""
    kept: list[Any] = []
    save = plots.save
    monkeypatch.setattr(plots, "save", lambda figure, path: (kept.append(figure), figure.savefig(path)))

    def drawn(rows: list[Score]) -> Any:
        plots.plot_scores(rows, [_cell("dense", 100.0), _cell("codes", 50.0)], "title", tmp_path / "plot.png")
        return kept[0]

    yield drawn
    save(kept[0], tmp_path / "again.png")  # which closes it
    assert not plt.get_fignums()


def test_dense_attention_is_a_line_across_in_a_colour_that_no_method_has(draw: Callable[[list[Score]], Any]) -> None:
    handles, labels = draw(ROWS).axes[0].get_legend_handles_labels()
    assert labels[0] == "dense attention"
    assert handles[0].get_linestyle() == "--"
    assert list(handles[0].get_ydata()) == [90.0, 90.0]
    coloured = {label: handle[0].get_color() for handle, label in zip(handles[1:], labels[1:], strict=True)}
    assert set(coloured) == {"codes dense", "codes quoka", "dense quoka"}
    assert same_color(coloured["codes dense"], coloured["codes quoka"])
    assert same_color(coloured["dense quoka"], handles[0].get_color())
    assert not same_color(coloured["codes dense"], handles[0].get_color())


def test_scores_of_single_turns_are_not_drawn(draw: Callable[[list[Score]], Any]) -> None:
    one = [
        _row("dense", "dense", None, 10.0, 1.0, turn=1, **NO_DIFFERENCE),
        _row("dense", "codes", 0.05, 20.0, 0.1, turn=1),
    ]
    handles, labels = draw([*ROWS[:3], *one]).axes[0].get_legend_handles_labels()
    assert labels == ["dense attention", "codes"]
    assert list(handles[1][0].get_ydata()) == [80.0, 85.0]


def test_a_method_that_reads_more_than_dense_attention_is_drawn(draw: Callable[[list[Score]], Any]) -> None:
    """A method that ranks every key reads half of them again at a budget of everything."""
    axis = draw([*ROWS[:3], _row("dense", "quoka", 1.0, 90.0, 1.5)]).axes[0]
    assert axis.get_xlim()[0] == 0
    assert axis.get_xlim()[1] > 1.5


def test_methods_of_two_packages_and_codes_have_three_colours(
    draw: Callable[[list[Score]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("norms", "zeros"):
        monkeypatch.setitem(methods.known, name, methods()["quest"])
    added = [_row("dense", name, 0.05, 80.0, 0.1) for name in ("norms", "zeros")]
    handles, labels = draw([*ROWS[:3], *added]).axes[0].get_legend_handles_labels()
    assert set(labels) == {"dense attention", "codes", "norms", "zeros"}
    assert len({to_rgb(handle[0].get_color()) for handle in handles[1:]} | {to_rgb(handles[0].get_color())}) == 4


def test_needle_maps_have_one_scale(draw: Callable[[list[Score]], Any]) -> None:
    assert {image.get_clim() for axis in draw(ROWS).axes for image in axis.get_images()} == {(0, 100)}
