"""The picture of an evaluation: dense attention in a colour of its own, needle maps in one scale."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import same_color

from sparsekv.cli.evaluating import plots
from sparsekv.runtime.evaluation.table import Cell, Score

NO_DIFFERENCE: dict[str, Any] = dict.fromkeys(("difference", "difference_low", "difference_high"))


def _row(prefill: str, method: str, budget: float | None, score: float, read: float, **changes: Any) -> Score:
    about = {"task": "niah-single", "length": 600, "tokens": 600.0, "metric": "match-all", "unit": "%"}
    counted = {"contexts": 10, "questions": 40, "seconds": 1.0, "score_low": score - 5, "score_high": score + 5}
    differs = {"difference": -5.0, "difference_low": -9.0, "difference_high": 1.0}
    values = about | counted | differs | changes
    return Score(prefill=prefill, method=method, variant="", budget=budget, score=score, kv_fraction=read, **values)


def _cell(method: str, score: float) -> Cell:
    return Cell("niah-single", 600, 0.25, "dense", method, "", None, 4, score)


@pytest.fixture
def figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    kept: list[Any] = []
    save = plots.save
    monkeypatch.setattr(plots, "save", lambda figure, path: (kept.append(figure), figure.savefig(path)))
    rows = [
        _row("dense", "dense", None, 90.0, 1.0, **NO_DIFFERENCE),
        _row("dense", "codes", 0.05, 80.0, 0.1),
        _row("dense", "codes", 0.1, 85.0, 0.2),
        _row("quoka", "dense", None, 70.0, 1.0),
        _row("quoka", "codes", 0.05, 60.0, 0.1),
    ]
    plots.plot_scores(rows, [_cell("dense", 100.0), _cell("codes", 50.0)], "title", tmp_path / "plot.png")
    yield kept[0]
    save(kept[0], tmp_path / "again.png")  # which closes it
    assert not plt.get_fignums()


def test_dense_attention_is_a_line_across_in_a_colour_that_no_method_has(figure: Any) -> None:
    axis = figure.axes[0]
    handles, labels = axis.get_legend_handles_labels()
    assert labels[0] == "dense attention"
    assert handles[0].get_linestyle() == "--"
    assert list(handles[0].get_ydata()) == [90.0, 90.0]
    coloured = {label: handle[0].get_color() for handle, label in zip(handles[1:], labels[1:], strict=True)}
    assert set(coloured) == {"codes dense", "codes quoka", "dense quoka"}
    assert same_color(coloured["codes dense"], coloured["codes quoka"])
    assert same_color(coloured["dense quoka"], handles[0].get_color())
    assert not same_color(coloured["codes dense"], handles[0].get_color())


def test_needle_maps_have_one_scale(figure: Any) -> None:
    assert {image.get_clim() for axis in figure.axes for image in axis.get_images()} == {(0, 100)}
