"""The picture of a recall report: each row is a point within the axes."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from sparsekv.cli.common.plots import save
from sparsekv.cli.reporting import plots
from sparsekv.runtime.reporting.report import RecallReport, RecallRow

UNKNOWN: dict[str, Any] = dict.fromkeys(("missed_estimate", "recall_seen", "list_coverage", "raised", "dense"))


def _row(budget: float, error: float) -> RecallRow:
    counted = {"budget_tokens": round(100 * budget), "selected_tokens": 100 * budget, "together": 1}
    shares = {"recall": budget, "attention_mass": budget, "missed_mass": 1 - budget, "kv_fraction": budget}
    place = {"method": "quest", "variant": "", "layer": 0, "kv_head": 0}
    values: dict[str, Any] = counted | shares | place | UNKNOWN
    return RecallRow(budget=budget, output_error=error, **values)


@pytest.mark.parametrize("errors", [(0.1, 0.02, 0.0), (0.0, 0.0, 0.0), (0.1, 0.02, 1e-6)], ids=str)
def test_each_row_is_a_point_within_the_axes(
    errors: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is exactly dense attention, such as that of a guard which gives every head everything."""
    kept: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, path: kept.append(figure))
    rows = [_row(budget, error) for budget, error in zip((0.1, 0.5, 1.0), errors, strict=True)]
    report = RecallReport("a.skv", "tiny", 120, 100, 8, "dense", None, rows)
    plots.plot_recall(report, tmp_path / "plot.png")
    (figure,) = kept
    drawn = [line for line in figure.axes[0].lines if line.get_label() != "Pareto front"]
    assert [list(line.get_ydata()) for line in drawn] == [list(errors)]
    figure.axes[0].autoscale_view()
    for x, y in drawn[0].get_xydata():
        place = (figure.axes[0].transData + figure.axes[0].transAxes.inverted()).transform((x, y))
        assert all(-0.01 <= part <= 1.01 for part in place)
    save(figure, tmp_path / "plot.png")  # which closes it
    assert not plt.get_fignums()
