"""Tables on stdout: those that fit into the terminal without a cut name or number, and those in LaTeX or Markdown."""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

from sparsekv.cli.common.console import say, say_wrapped, stdout_console
from sparsekv.cli.common.options import Markup
from sparsekv.cli.common.streams import printable

T = TypeVar("T")
_LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "*": "{*}",  # LaTeX reads a star or a bracket after a row's end as an argument of the row's end
        "[": "{[}",
    }
)
_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`*_<>|~&"})
MOST_COLUMNS = 10_000
"""Columns of a terminal into which every table fits."""


def titled_table(title: str, texts: Iterable[str], numbers: Iterable[str], *, wrap: bool = False) -> Table:
    """Return an empty table with its title on the left. The columns of `texts` come first, then those of `numbers`,
    which are aligned to the right. With `wrap` the columns of `numbers` may break into lines."""
    table = Table(title=title, title_justify="left", title_style="")
    for name in texts:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=not wrap)
    return table


def grouped(rows: Iterable[T], names: Sequence[str]) -> list[list[T]]:
    """Group rows with equal values of the fields `names`; return the groups in the order of their first rows."""
    groups: dict[tuple[Any, ...], list[T]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return list(groups.values())


def differing(rows: Iterable[object], names: Sequence[str]) -> list[str]:
    """Return the fields among `names` whose values differ between the rows."""
    return [name for name in names if len({getattr(row, name) for row in rows}) > 1]


def show_fitting(table: Table, lesser: Sequence[str], width: int = 120) -> None:
    """Print a table to stdout. No name and no number is cut: what does not fit into the terminal is left out.

    Headers of number columns are folded first. Columns are then left out in the order of `lesser`, and only as many as
    needed: a column that fits beside the more important ones stays. A line below the table names the columns that were
    left out. If even the columns outside `lesser` do not fit, each row is printed as lines of header and cell.

    Args:
        lesser: headers of columns that may be left out, on one line each, the least important first.
        width: columns of the output without a terminal.
    """
    console = stdout_console(width)

    def fits(left_out: Sequence[str], *, folded: bool = True) -> bool:
        return _least_width(_without(table, left_out, folded=folded), console) <= console.width

    left_out = _fewest([header for header in lesser if header in map(_header, table.columns)], fits)
    if not fits(left_out):
        console.print(table.title or "", *_stacked(table), "", sep="\n")
        return
    console.print(_without(table, left_out, folded=not fits(left_out, folded=False)))
    if left_out:
        say_wrapped([f"Not shown in {console.width} columns: {', '.join(left_out)} (a wider terminal or --json)."])


def say_markup(table: Table, markup: Markup) -> None:
    """Print a table without its title to stdout, as LaTeX with the package booktabs or as GitHub's Markdown."""
    say("\n".join(_latex(table) if markup == "latex" else _markdown(table)))


def _latex(table: Table) -> list[str]:
    header, *rows = [f"{' & '.join(cells)} \\\\" for cells in _marked_up(table, _LATEX)]
    sections = ["\\midrule" if row.end_section and row is not table.rows[-1] else "" for row in table.rows]
    body = [line for pair in zip(rows, sections, strict=True) for line in pair if line]
    columns = "".join("r" if column.justify == "right" else "l" for column in table.columns)
    begin, end = [f"\\begin{{tabular}}{{{columns}}}", "\\toprule"], ["\\bottomrule", "\\end{tabular}"]
    return [*begin, header, "\\midrule", *body, *end]


def _markdown(table: Table) -> list[str]:
    header, *rows = [f"| {' | '.join(cells)} |" for cells in _marked_up(table, _MARKDOWN)]
    ruler = "|".join("---:" if column.justify == "right" else "---" for column in table.columns)
    return [header, f"|{ruler}|", *rows]


def _marked_up(table: Table, escapes: Mapping[int, str]) -> list[list[str]]:
    """Return the header and the rows of a table, each cell on one line and escaped."""
    columns = [[column.header, *column.cells] for column in table.columns]
    texts = [[printable(" ".join(str(cell).split())).translate(escapes) for cell in column] for column in columns]
    return [list(row) for row in zip(*texts, strict=True)]


def _header(column: Column) -> str:
    return " ".join(str(column.header).split())


def _fewest(lesser: Sequence[str], fits: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return the headers of `lesser`, the least important first, that must be left out so that a table fits."""
    left_out: list[str] = []
    while not fits(left_out) and len(left_out) < len(lesser):
        left_out.append(lesser[len(left_out)])
    for header in reversed(left_out):
        fewer = [other for other in left_out if other != header]
        left_out = fewer if fits(fewer) else left_out
    return left_out


def _without(table: Table, headers: Sequence[str], *, folded: bool) -> Table:
    """Return a table without the columns `headers`; no cell of the other columns is cut.

    With `folded`, the header of a column whose cells do not wrap is broken into lines. A line is at most as wide as the
    column's widest cell, or as the longest word of the header.
    """
    slim = Table(
        title=table.title,
        title_justify=table.title_justify,
        title_style=table.title_style,
        box=table.box,
        collapse_padding=table.collapse_padding,
        pad_edge=table.pad_edge,
    )
    kept = [column for column in table.columns if _header(column) not in headers]
    for column in kept:
        header = _folded(column) if folded and column.no_wrap else str(column.header)
        texts = [header, *map(str, column.cells)]
        uncut = [part for text in texts for part in (text.splitlines() if column.no_wrap else text.split())]
        slim.add_column(
            header,
            justify=column.justify,
            vertical=column.vertical,
            no_wrap=column.no_wrap,
            min_width=max(map(cell_len, uncut), default=0),
        )
    for row, *cells in zip(table.rows, *(column.cells for column in kept), strict=True):
        slim.add_row(*cells, end_section=row.end_section)
    return slim


def _folded(column: Column) -> str:
    words = _header(column).split()
    lines = [line for cell in column.cells for line in str(cell).splitlines()]
    width = max([1, *map(cell_len, [*words, *lines])])
    return "\n".join(textwrap.wrap(" ".join(words), width, break_long_words=False, break_on_hyphens=False))


def _least_width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(width=MOST_COLUMNS), table).minimum


def _stacked(table: Table) -> list[str]:
    """Return lines of header and cell. A blank line precedes each row, and empty cells are left out."""
    headers = [_header(column) for column in table.columns]
    lines = []
    for row in zip(*(column.cells for column in table.columns), strict=True):
        cells = zip(headers, map(str, row), strict=True)
        lines += ["", *(f"{header}: {cell}" if header else cell for header, cell in cells if cell)]
    return lines
