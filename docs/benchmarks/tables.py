"""Write the tables of results.md and evaluation.md from history.jsonl, between each table's two marker comments.

A line of history.jsonl is one measured figure. Its name is "TABLE | ROW LABELS ... | COLUMN". A table has the newest
run of each row, with repeated measurements side by side. Older lines stay in the file as a record.
"""

import json
import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

FOLDER = Path(__file__).parent
HISTORY = FOLDER / "history.jsonl"
PAGES = (FOLDER / "results.md", FOLDER / "evaluation.md")
KEYS = ("date", "commit", "machine", "command", "figure", "value", "unit")
LOWER, UPPER = ", lower", ", upper"
"""Suffixes of a column's name for the bounds of an interval: quartiles of times, 95% intervals of scores."""
MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)
"""A table on a page: a marker with its name and the headers of its row labels, its lines, and the end marker."""


@dataclass(frozen=True)
class Figure:
    """One line of the history. `value` is the text of the number, because the number of its digits must be kept."""

    date: str | None
    commit: str | None
    machine: str | None
    command: str | None
    figure: str
    value: str
    unit: str | None

    @property
    def run(self) -> tuple[str | None, ...]:
        """Identity of a run of one version on one machine; a table has the figures of one run side by side."""
        return self.date, self.commit, self.machine


Rows = dict[tuple[str, ...], dict[str, list[Figure]]]
"""Figures by row labels and by column."""


def read(path: Path = HISTORY) -> list[Figure]:
    """Return all figures in the order of the file, oldest first."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Figure(**json.loads(line, parse_float=str, parse_int=str)) for line in lines]


def render(page: str, figures: list[Figure]) -> str:
    """Return the page with new tables. Raises KeyError if the history has no figure of a table."""
    return MARKED.sub(lambda found: f"{found[1]}{table(found[2], figures)}{found[3]}", page)


def table(marker: str, figures: list[Figure]) -> str:
    """Return a table, and the lines with its machines, commits and commands. Raises KeyError if it has no figures."""
    name, *headers = marker.split("; ")
    rows = newest(name, figures)
    if not rows:
        raise KeyError(f"history.jsonl has no figures of the table {name}")
    columns: dict[str, str] = {}
    for row in sorted(rows.values(), key=len, reverse=True):  # a full row has its columns in order
        for column, runs in row.items():
            if not column.endswith((LOWER, UPPER)):
                columns[column] = f"{column}, {runs[0].unit}" if runs[0].unit else column
    lines = [[*headers, *columns.values()], ["---"] * len(headers) + ["---:"] * len(columns)]
    lines += [[*labels, *(cell(row, column) for column in columns)] for labels, row in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{origin(rows)}\n"


def newest(name: str, figures: list[Figure]) -> Rows:
    """Return a table's figures by row and column. A row has the figures of its newest run only."""
    rows: Rows = {}
    for figure in figures:
        table_name, *labels, column = figure.figure.split(" | ")
        if table_name != name:
            continue
        key = tuple(labels)
        if key in rows and next(iter(rows[key].values()))[0].run != figure.run:
            del rows[key]
        rows.setdefault(key, {}).setdefault(column, []).append(figure)
    return rows


def cell(row: dict[str, list[Figure]], column: str) -> str:
    """Return the values of a row in one column, each with its interval if one was measured."""
    bounds = zip(row.get(column + LOWER, []), row.get(column + UPPER, []), strict=True)
    ranges = [f" [{shown(low)}, {shown(high)}]" for low, high in bounds]
    values = [shown(figure) for figure in row.get(column, [])]
    return ", ".join(value + spread for value, spread in zip(values, ranges or [""] * len(values), strict=True))


def shown(figure: Figure) -> str:
    """Return a value with commas between thousands, and with its sign if it is a difference in points."""
    sign, digits = ("\N{MINUS SIGN}", figure.value[1:]) if figure.value.startswith("-") else ("", figure.value)
    if figure.unit == "points" and not sign and float(digits):
        sign = "+"
    whole, point, fraction = digits.partition(".")
    return f"{sign}{int(whole):,}{point}{fraction}"


def origin(rows: Rows) -> str:
    """Return lines with the machine, date, commit and commands of each run in a table."""
    commands: dict[tuple[str | None, ...], dict[str, None]] = {}
    for row in rows.values():
        for figure in chain.from_iterable(row.values()):
            known = commands.setdefault(figure.run, {})
            if figure.command:
                known[f"`{figure.command}`"] = None
    lines = []
    for (date, commit, machine), ran in commands.items():
        line = f"- {machine or 'machine unknown'}, {date or 'date unknown'}, commit {commit or 'unknown'}"
        lines.append(f"{line}: {', '.join(ran)}" if ran else line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8"), read()), encoding="utf-8")
