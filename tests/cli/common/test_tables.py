"""Tables on narrow terminals: no name and no number is cut, and what is left out is told."""

import json
import re
from pathlib import Path

import pytest
from support.command import run_here
from support.terminal import on_terminal

from sparsekv.cli.common.tables import say_markup, show_fitting, titled_table

WIDTHS = (30, 60, 80, 100, 120)
HOW = ("--method", "squeezed", "--method", "quest", "--budget", "10%", "-q")
EVAL = ("eval", "doc.txt", "--model", "model", "--contexts", "1", "--tail", "64", "--questions", "1", "-q")
COMMANDS = {
    "recall-report": (("recall-report", *HOW), "rows", "output_error"),
    "bench": (("bench", "--context", "512", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", *HOW), "rows", None),
    "eval": ((*EVAL, "--max-new-tokens", "1", "--length", "700", "--method", "quest"), "rows", None),
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
    assert "Models for --model that need no model hub" in shown


def test_columns_that_are_left_out_are_named(place: Path) -> None:
    asked, *_ = COMMANDS["recall-report"]
    code, shown = on_terminal(*asked, cwd=place, columns=60)
    assert code == 0
    left_out = re.search(r"Not shown in 60 columns: (.*) \(a wider", " ".join(shown.split()))
    assert left_out is not None
    assert "attention mass" in left_out[1]
    assert "recall" in shown.partition("Not shown")[0]
    assert "Not shown" not in on_terminal(*asked, cwd=place, columns=120)[1]


LESSER = {"least": "1", "lesser": "0.123456", "a wide header of numbers": "+0.0 [-12.0, +12.0]"}
"""Headers of columns that may be left out and their cells, the least important first."""


def _columns_at(width: int, capsys: pytest.CaptureFixture[str], lesser: dict[str, str]) -> tuple[list[str], str]:
    """Headers of `lesser` that a table shows in a number of columns, and the table."""
    table = titled_table("", ["method"], ["score", *lesser])
    table.add_row("quest", "50.0", *lesser.values())
    show_fitting(table, list(lesser), width=width)
    shown = capsys.readouterr().out.partition("Not shown")[0]
    return [header for header, cell in lesser.items() if f" {cell} " in shown], shown


def test_a_column_is_left_out_only_if_it_does_not_fit_beside_more_important_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = _columns_at(120, capsys, LESSER)[1].splitlines()[0]
    for width in range(22, len(whole) + 1):
        expected: dict[str, str] = {}
        for header, cell in reversed(LESSER.items()):
            more = {header: cell, **expected}
            expected = more if len(_columns_at(width, capsys, more)[0]) == len(more) else expected
        found, shown = _columns_at(width, capsys, LESSER)
        assert set(found) == set(expected), shown
        assert all(len(line) <= width for line in shown.splitlines())
    assert _columns_at(len(whole), capsys, LESSER)[0] == [*LESSER]


def test_a_header_is_folded_before_its_column_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    whole = _columns_at(120, capsys, LESSER)[1].splitlines()[0]
    narrower = len(whole) - 1
    found, shown = _columns_at(narrower, capsys, LESSER)
    assert found == [*LESSER]
    assert "a wide header of numbers" not in shown
    assert all(len(line) <= narrower for line in shown.splitlines())


def test_rows_are_stacked_where_no_column_fits(place: Path) -> None:
    asked, *_ = COMMANDS["recall-report"]
    _, shown = on_terminal(*asked, cwd=place, columns=30)
    assert re.search(r"\n\n(\*\n)?method: squeezed flat\nbudget: 10%\nselected tokens: ", shown)


TABLES = {
    "recall-report": ("recall-report", *HOW, "--method", "oracle"),
    "bench": (*COMMANDS["bench"][0], "--runs", "2", "--warm", "--batch", "1", "--batch", "2"),
    "tune": COMMANDS["tune"][0],
    "eval": (*EVAL, "--max-new-tokens", "1", "--length", "700", "--length", "800", "--method", "quest"),
}


@pytest.mark.parametrize("command", TABLES)
def test_a_table_for_a_paper_is_alone_on_stdout_and_has_every_row(place: Path, command: str) -> None:
    asked, table = TABLES[command], {}
    for markup in ("latex", "markdown"):
        outcome = run_here(*asked, f"--{markup}")
        assert outcome.code == 0, outcome.stderr
        table[markup] = outcome.stdout.splitlines()
    begin, top, header, *body, bottom, end = table["latex"]
    columns = begin.removeprefix("\\begin{tabular}{").removesuffix("}")
    assert (top, bottom, end) == ("\\toprule", "\\bottomrule", "\\end{tabular}")
    rows = [line for line in [header, *body] if line != "\\midrule"]
    assert {line.count(" & ") + 1 for line in rows} == {len(columns)}
    assert all(line.endswith(r" \\") and not re.search(r"(?<!\\)[%_#$]", line) for line in rows)
    first, ruler, *others = table["markdown"]
    assert {len(re.findall(r"(?<!\\)\|", line)) - 1 for line in table["markdown"]} == {len(columns)}
    assert re.fullmatch(r"\|((---:|---)\|)+", ruler)
    assert len(others) + 1 == len(rows)
    words = [re.findall("[a-z]+", line) for line in (*rows, first, *others)]
    assert sorted(words[: len(rows)]) == sorted(words[len(rows) :])  # times differ, and some rows are in their order
    found = json.loads(run_here(*asked, "--json").stdout)
    assert len(others) == len(found.get("rows") or [*found["methods"], found["before"]])


def test_characters_with_a_meaning_in_latex_and_markdown_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    table = titled_table("a title", ["a\nname"], ["%"])
    table.add_row("* 50% of a_b #1 & {x|y} <z> ^~$ \\", "[1, 2]")
    say_markup(table, "latex")
    assert capsys.readouterr().out.splitlines() == [
        "\\begin{tabular}{lr}",
        "\\toprule",
        r"a name & \% \\",
        "\\midrule",
        r"{*} 50\% of a\_b \#1 \& \{x\textbar{}y\} \textless{}z\textgreater{} \textasciicircum{}\textasciitilde{}\$"
        r" \textbackslash{} & {[}1, 2] \\",
        "\\bottomrule",
        "\\end{tabular}",
    ]
    say_markup(table, "markdown")
    assert capsys.readouterr().out.splitlines() == [
        "| a name | % |",
        "|---|---:|",
        r"| \* 50% of a\_b #1 \& {x\|y} \<z\> ^\~$ \\ | [1, 2] |",
    ]
