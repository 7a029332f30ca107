"""Means of a trace's document that a page has to show for a selection, by their definition."""

from statistics import fmean
from typing import Any

KINDS = ("chosen", "stood_for", "missed")


def percent(share: float | None) -> str:
    """Return a share as pages write it."""
    if share is None:
        return "\u2013"
    value = 100 * share
    if 0 < value < 0.01:
        return "< 0.01%"
    return f"{value:.2f}%" if value < 9.995 else f"{value:.1f}%"


def rows_of(
    trace: dict[str, Any], tokens: tuple[int, int] | None, layer: int | None, head: int | None
) -> list[dict[str, Any]]:
    """Return the rows whose mean is shown: rows by token, rows by head, or records."""
    span = range(tokens[0], tokens[1] + 1) if tokens else range(len(trace["answer_tokens"]))
    if layer is None and head is None:
        return [trace["by_token"][token] for token in span]
    rows = trace["records"] if tokens else trace["by_head"]
    return [
        row
        for row in rows
        if layer in (None, row["layer"]) and head in (None, row["kv_head"]) and row.get("token", span[0]) in span
    ]


def mean_shares(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {name: fmean(row[name] for row in rows) for name in ("exact", *KINDS)}


def mean_passages(rows: list[dict[str, Any]]) -> dict[int, list[float]]:
    """Return, for each passage that a row lists, the mean of its three shares."""
    found: dict[int, list[float]] = {}
    for row in rows:
        for passage, *shares in row["passages"]:
            sums = found.setdefault(passage, [0.0, 0.0, 0.0])
            found[passage] = [have + share / len(rows) for have, share in zip(sums, shares, strict=True)]
    return found


def mean_measures(
    trace: dict[str, Any], tokens: tuple[int, int] | None, layer: int | None, head: int | None
) -> dict[str, float]:
    """Return the mean measures of some tokens' records; for the whole answer, the document's own measures."""
    if tokens is None and layer is None and head is None:
        return dict(trace["measures"])
    span = range(tokens[0], tokens[1] + 1) if tokens else None
    rows = [
        row
        for row in trace["by_head_measures" if span is None else "records"]
        if layer in (None, row["layer"]) and head in (None, row["kv_head"]) and (span is None or row["token"] in span)
    ]
    return {name: fmean(row[name] for row in rows) for name in trace["measures"]}
