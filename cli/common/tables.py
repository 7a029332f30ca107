"""Tables on stdout: those that fit into the terminal without a cut name or number, and those in LaTeX or Markdown."""

from collections.abc import Iterable, Mapping, Sequence
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
    """Return the rows in groups, those with equal values of the fields `names`, in the order of their first rows."""
    groups: dict[tuple[Any, ...], list[T]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return list(groups.values())


def differing(rows: Iterable[object], names: Sequence[str]) -> list[str]:
    """Return those of the fields `names` that do not have one value in all rows."""
    return [name for name in names if len({getattr(row, name) for row in rows}) > 1]


def show_fitting(table: Table, lesser: Sequence[str], width: int = 120) -> None:
    """Print a table to stdout. No name and no number is cut: what does not fit into the terminal is left out.

    Columns are left out one by one, in the order of `lesser`, until the others fit, and a line below names them. If
    even the others do not fit, each row is printed as lines of header and cell.

    Args:
        lesser: headers of columns that may be left out, on one line each.
        width: columns of the output without a terminal.
    """
    console = stdout_console(width)
    left_out: list[str] = []
    here = [header for header in lesser if header in map(_header, table.columns)]
    slim = _without(table, left_out)
    while _least_width(slim, console) > console.width and len(left_out) < len(here):
        left_out.append(here[len(left_out)])
        slim = _without(table, left_out)
    if _least_width(slim, console) > console.width:
        console.print(table.title or "", *_stacked(table), "", sep="\n")
        return
    console.print(slim)
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


def _without(table: Table, headers: Sequence[str]) -> Table:
    """Return a table without some of its columns, in which no cell of the other columns is cut."""
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
        texts = [str(text) for text in (column.header, *column.cells)]
        uncut = [part for text in texts for part in (text.splitlines() if column.no_wrap else text.split())]
        slim.add_column(
            column.header,
            justify=column.justify,
            vertical=column.vertical,
            no_wrap=column.no_wrap,
            min_width=max(map(cell_len, uncut), default=0),
        )
    for row, *cells in zip(table.rows, *(column.cells for column in kept), strict=True):
        slim.add_row(*cells, end_section=row.end_section)
    return slim


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
