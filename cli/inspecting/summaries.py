"""Tables of `inspect` over all layers: how clusters and posting lists are spread, where --by layer shows each layer."""

from collections.abc import Callable, Iterable
from statistics import fmean, median
from typing import Any

from rich.table import Table

Rows = list[dict[str, Any]]


def cluster_summary(rows: Rows) -> Table:
    """A row a level: clusters, and the sizes and spreads of all layers together."""
    table = Table(
        title="clusters of all layers; sizes in tokens: the least, the median of medians, the most (--by layer)",
        title_justify="left",
        title_style="",
    )
    for name in ("level", "clusters", "min", "median", "max", "empty", "of one", "key spread", "value spread"):
        table.add_column(name, justify="right")
    for level in sorted({row["level"] for row in rows}):
        some = [row for row in rows if row["level"] == level]
        columns: dict[str, Callable[[list[float]], float]] = {
            "clusters": sum, "min": min, "median": median, "max": max, "empty": sum, "single": sum,
        }  # fmt: skip
        sizes = (f"{combine([row[name] for row in some]):,.0f}" for name, combine in columns.items())
        table.add_row(str(level), *sizes, *(_spread(some, name) for name in ("key_spread", "value_spread")))
    return table


def list_summary(rows: Rows) -> Table:
    """One row: lists and entries of all layers, what share of the keys they name, and how unlike subspaces are."""
    table = Table(
        title="posting lists of all layers: means, and the least and the most of a layer (--by layer)",
        title_justify="left",
        title_style="",
    )
    for name in ("lists", "entries each", "keys listed", "in lists", "a query's most", "its least"):
        table.add_column(name, justify="right")
    ranked = {"most": [row["ranked_shares"][0] for row in rows], "least": [row["ranked_shares"][-1] for row in rows]}
    shares = ([row[name] for row in rows] for name in ("keys_listed", "in_lists"))
    table.add_row(
        f"{sum(row['lists'] for row in rows):,}",
        f"{rows[0]['entries']:,}",
        *map(_range, [*shares, *ranked.values()]),
    )
    return table


def _spread(rows: Rows, name: str) -> str:
    """The mean of a level's spreads, with its least and its most; `none` where a layer has none."""
    values = [row[name] for row in rows]
    return "none" if None in values else _range(values)


def _range(values: Iterable[float]) -> str:
    known = list(values)
    return f"{fmean(known):.3f} ({min(known):.3f} to {max(known):.3f})"
