"""Tables of results are those of history.jsonl, and the README's figures are figures of the pages of benchmarks."""

import json
import re
import sys
from pathlib import Path

import pytest
from support.doc_pages import ROOT, name

sys.path.insert(0, str(ROOT / "docs" / "benchmarks"))

import tables

EARLIER = {"date": "2026-01-01", "commit": "aaaaaaa", "machine": "A", "command": "sparsekv bench", "unit": "ms"}
LATER = EARLIER | {"date": "2026-01-02", "commit": "bbbbbbb"}


def history(folder: Path, *lines: dict[str, object]) -> list[tables.Figure]:
    path = folder / "history.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return tables.read(path)


@pytest.mark.parametrize("page", tables.PAGES, ids=name)
def test_tables_are_those_of_the_history(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert tables.render(text, tables.read()) == text, "run `make docs`"


def test_each_line_has_the_keys_of_a_figure() -> None:
    for number, line in enumerate(tables.HISTORY.read_text(encoding="utf-8").splitlines(), 1):
        figure = json.loads(line)
        assert tuple(figure) == tables.KEYS, number
        assert isinstance(figure["value"], int | float), number
        assert figure["figure"].count(" | ") >= 2, number


def test_a_row_is_of_its_newest_run(tmp_path: Path) -> None:
    figures = history(
        tmp_path,
        EARLIER | {"figure": "step | codes | time", "value": 3.0},
        EARLIER | {"figure": "step | codes | error", "value": 0.5},
        EARLIER | {"figure": "step | quest | time", "value": 4.0},
        LATER | {"figure": "step | codes | time", "value": 2.0},
        LATER | {"figure": "step | codes | time", "value": 2.5},
    )
    assert tables.table("step; method", figures).splitlines()[:4] == [
        "| method | time, ms |",
        "| --- | ---: |",
        "| quest | 4.0 |",
        "| codes | 2.0, 2.5 |",
    ]


def test_digits_are_kept_and_an_interval_follows_its_value(tmp_path: Path) -> None:
    columns = ("time", "time, lower", "time, upper")
    lines = [
        json.dumps(EARLIER | {"figure": f"step | codes | {column}", "value": "@"}).replace('"@"', value)
        for column, value in zip(columns, ("1234.50", "1200.10", "1300.00"), strict=True)
    ]
    (tmp_path / "history.jsonl").write_text("\n".join(lines) + "\n")
    shown = tables.table("step; method", tables.read(tmp_path / "history.jsonl"))
    assert "| codes | 1,234.50 [1,200.10, 1,300.00] |" in shown


def test_differences_have_a_sign(tmp_path: Path) -> None:
    lines = [
        EARLIER | {"figure": f"facts | {i} | score", "value": v, "unit": "points"}
        for i, v in enumerate((-0.5, 0.0, 1.5))
    ]
    rows = tables.table("facts; method", history(tmp_path, *lines)).splitlines()[2:5]
    assert rows == ["| 0 | \N{MINUS SIGN}0.5 |", "| 1 | 0.0 |", "| 2 | +1.5 |"]


def test_a_table_without_figures_is_an_error(tmp_path: Path) -> None:
    figures = history(tmp_path, EARLIER | {"figure": "step | codes | time", "value": 3.0})
    with pytest.raises(KeyError, match="no figures of the table other"):
        tables.table("other; method", figures)


def test_figures_of_the_readme_are_of_a_page_of_benchmarks() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if re.match(r"\| .*\]\(docs/benchmarks/", line)]
    assert len(rows) > 5
    pages = *tables.PAGES, tables.FOLDER / "board.md"
    measured = "".join(page.read_text(encoding="utf-8") for page in pages)
    for row in rows:
        figures = re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.])", re.sub(r"\]\([^)]*\)", "", row))
        lost = [figure for figure in figures if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d])", measured)]
        assert not lost, f"{row}: {lost}"
