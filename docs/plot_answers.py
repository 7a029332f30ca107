"""Plot right answers against what a step reads and against how long it takes, for methods at one budget.

Takes what `sparsekv eval --json` and `sparsekv bench --json` printed, of the same methods at the same budget, and the
picture's name. The bench's steps are of one layer, over an index as long as the evaluation's contexts.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from sparsekv.cli.common.plots import in_percent, style_of

DENSE = "dense"


def main() -> None:
    answered, timed = (json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:3])
    rows = answered["rows"]
    times = {
        row["method"]: row["median_ms"] for row in reversed(timed["rows"])
    }  # of dense attention the fastest, first
    figure, (reads, steps) = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for row in rows:
        _point(reads, row, row["kv_fraction"])
        if row["method"] in times:
            _point(steps, row, times[row["method"]])
    reads.set_xlabel("keys and values read, as a share of dense attention's")
    in_percent(reads.xaxis)
    steps.set_xlabel(f"a step of one layer, ms ({timed['machine']})")
    steps.set_xscale("log")
    dense = next(row for row in rows if row["method"] == DENSE)
    for axis in (reads, steps):
        axis.axhline(dense["score"], color="black", linestyle="--", linewidth=1)
        axis.grid(alpha=0.3)
    first = rows[0]
    reads.set_ylabel("right answers, %")
    questions = f"{first['questions']} questions about facts, {first['tokens']:,.0f} tokens"
    figure.suptitle(f"{answered['model']}, {questions}, budget {100 * _budget(rows):g}%")
    figure.legend(*reads.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    figure.savefig(sys.argv[3], dpi=110)


def _point(axis: Axes, row: dict[str, Any], across: float) -> None:
    style = style_of(row["method"], 0) | {"linestyle": "none"}
    if row["method"] == DENSE:
        style |= {"color": "black", "marker": "*", "markersize": 10}
    ends = [[row["score"] - row["score_low"]], [row["score_high"] - row["score"]]]
    axis.errorbar(across, row["score"], yerr=ends, label=row["method"], elinewidth=0.6, capsize=2, **style)


def _budget(rows: list[dict[str, Any]]) -> float:
    (budget,) = {row["budget"] for row in rows} - {None}
    return float(budget)


if __name__ == "__main__":
    main()
