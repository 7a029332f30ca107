"""Reading of a trace's page back into its document, as the page's script does."""

import base64
from array import array
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from .html_page import WrittenPage

TYPES = {"u1": "B", "u2": "H", "u4": "I"}
SHARES = ("exact", "chosen", "stood_for", "missed")


def read_trace_page(path: Path) -> dict[str, Any]:
    """Return the document of a page that `write_trace_page` wrote."""
    packed = WrittenPage(path).data()
    groups = {name: _rows(packed[name]) for name in ("by_token", "by_head", "records")}
    return {**packed["facts"], "passages": _passages(packed["prompt"]), **groups}


def _passages(prompt: dict[str, Any]) -> list[dict[str, Any]]:
    units = prompt["text"].encode("utf-16-le")
    tokens = [units[2 * start : 2 * end].decode("utf-16-le") for start, end in _runs(read_column(prompt["lengths"]))]
    return [
        {"start": start, "tokens": tokens[first:last]}
        for start, (first, last) in zip(read_column(prompt["start"]), _runs(read_column(prompt["tokens"])), strict=True)
    ]


def _rows(group: dict[str, Any]) -> list[dict[str, Any]]:
    columns = {name: _list(one) if "counts" in one else read_column(one) for name, one in group.items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _list(packed: dict[str, Any]) -> list[list[list[Any]]]:
    names = [name for name in packed if name != "counts"]
    entries = [list(values) for values in zip(*(read_column(packed[name]) for name in names), strict=True)]
    return [entries[start:end] for start, end in _runs(read_column(packed["counts"]))]


def read_column(column: dict[str, str]) -> list[Any]:
    data = base64.b64decode(column["data"])
    if column["type"] in TYPES:
        return list(array(TYPES[column["type"]], data))
    others = iter(array("d", base64.b64decode(column["others"])))
    return [_share(code, others) for code in array("H", data)]


def _share(code: int, others: Any) -> float | None:
    if code in (0, 63_001, 65_534):
        return {0: 0.0, 63_001: 1.0}.get(code)
    if code == 65_535:
        return float(next(others))
    decade, digits = divmod(code - 1, 9000)
    return (digits + 1000) / 10 ** (4 + decade)


def _runs(lengths: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(lengths, initial=0)))
