"""The Pareto front of a report: the rows that none beside them beats both in what is read and in the error."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sparsekv.runtime.reporting.report import RecallRow
from sparsekv.runtime.selection.registry import methods


def pareto_front(rows: Sequence[RecallRow]) -> list[RecallRow]:
    """Rows for which no other reads at most as much and errs at most as much, and less of one of the two.

    Compared are rows of the same layer, KV head and number of queries together. Bounds, such as the oracle, are no
    methods to take and are left out.
    """
    groups: dict[tuple[int | None, int | None, int], list[RecallRow]] = {}
    for row in rows:
        if not methods()[row.method].is_bound:
            groups.setdefault((row.layer, row.kv_head, row.together), []).append(row)
    return [row for group in groups.values() for row in _front(group)]


def _front(rows: list[RecallRow]) -> Iterator[RecallRow]:
    least, last = math.inf, (math.inf, math.inf)
    for row in sorted(rows, key=_costs):
        if row.output_error < least or _costs(row) == last:
            yield row
            least, last = row.output_error, _costs(row)


def _costs(row: RecallRow) -> tuple[float, float]:
    return row.kv_fraction, row.output_error


def row_records(rows: Sequence[RecallRow]) -> list[dict[str, Any]]:
    """Rows as flat dicts, in the order they are given in, each with `front`: whether it is on the Pareto front."""
    front = set(pareto_front(rows))
    return [{**asdict(row), "front": row in front} for row in rows]


def in_order(rows: Sequence[RecallRow]) -> list[RecallRow]:
    """Rows by layer, KV head, budget, queries together and error."""

    def key(row: RecallRow) -> tuple[float, ...]:
        place = [-1 if number is None else number for number in (row.layer, row.kv_head)]
        return (*place, row.budget_tokens, row.together, row.output_error)

    return sorted(rows, key=key)
