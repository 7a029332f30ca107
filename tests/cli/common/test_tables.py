"""Tables on narrow terminals: no name and no number is cut, and what is left out is told."""

import json
import re
from pathlib import Path

import pytest
from support.command import run_here
from support.terminal import on_terminal

WIDTHS = (30, 60, 80, 100, 120)
HOW = ("--method", "squeezed", "--method", "quest", "--budget", "10%", "-q")
COMMANDS = {
    "recall-report": (("recall-report", *HOW), "rows", "output_error"),
    "bench": (("bench", "--context", "512", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", *HOW), "rows", None),
    "tune": (("tune", "--target-recall", "0.5", "--method", "squeezed", "--dry-run", "-q"), "methods", None),
}


@pytest.mark.thinned
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_names_and_numbers_are_whole_at_any_width(place: Path, command: str, width: int) -> None:
    asked, rows, error = COMMANDS[command]
    code, styled = on_terminal(*asked, cwd=place, columns=width)
    shown = re.sub(r"\x1b\[\d*m", "", styled)
    assert code == 0, shown
    assert "…" not in shown
    assert all(len(line) <= width for line in shown.splitlines())
    for row in json.loads(run_here(*asked, "--json").stdout)[rows]:
        assert re.search(rf"\b{row['method']}\b", shown)
        assert error is None or f"{row[error]:.4f}" in shown


def test_a_models_name_is_whole(place: Path) -> None:
    code, shown = on_terminal("models", "list", cwd=place, columns=60)
    assert code == 0
    assert "smollm2-135m-instruct" in shown


def test_columns_that_are_left_out_are_named(place: Path) -> None:
    asked, *_ = COMMANDS["recall-report"]
    code, shown = on_terminal(*asked, cwd=place, columns=60)
    assert code == 0
    left_out = re.search(r"Not shown in 60 columns: (.*) \(a wider", " ".join(shown.split()))
    assert left_out is not None
    assert "attention mass" in left_out[1]
    assert "recall" in shown.partition("Not shown")[0]
    assert "Not shown" not in on_terminal(*asked, cwd=place, columns=120)[1]


def test_rows_are_stacked_where_no_column_fits(place: Path) -> None:
    asked, *_ = COMMANDS["recall-report"]
    _, shown = on_terminal(*asked, cwd=place, columns=30)
    assert re.search(r"\n\n(\*\n)?method: squeezed flat\nbudget: 10%\nselected tokens: ", shown)
