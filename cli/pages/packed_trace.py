"""A trace's document packed so that a page of many tokens, layers and heads stays small; nothing of it is rounded."""

from typing import Any

from sparsekv.cli.pages.columns import share_column, whole_column
from sparsekv.cli.pages.report_page import budget_text

LISTS = ("passages", "by_token", "by_head", "records")
KEYS = {"by_token": (), "by_head": ("layer", "kv_head"), "records": ("token", "layer", "kv_head")}
TOKEN_LISTS = {"by_token": (), "by_head": (), "records": ("chosen_tokens", "missed_tokens")}
SHARES = ("exact", "chosen", "stood_for", "missed")
MEASURES = {"by_token": (), "by_head": (), "records": ("recall", "attention_mass", "output_error", "kv_fraction")}


def packed_trace(document: dict[str, Any]) -> dict[str, Any]:
    """What `assets/trace_data.js` reads: `facts` (whatever is no long list), `prompt`, and the groups of shares."""
    facts = {name: value for name, value in document.items() if name not in LISTS}
    groups = {name: _group(document[name], KEYS[name], MEASURES[name], TOKEN_LISTS[name]) for name in KEYS}
    budget = budget_text(document["budget"])
    return {"facts": facts, "budget_text": budget, "prompt": _prompt(document["passages"]), **groups}


def _prompt(passages: list[dict[str, Any]]) -> dict[str, Any]:
    """The text in one piece, and where tokens and passages begin in it; lengths are UTF-16 units, as in JavaScript."""
    tokens = [token for passage in passages for token in passage["tokens"]]
    return {
        "text": "".join(tokens),
        "lengths": whole_column([len(token.encode("utf-16-le", "surrogatepass")) // 2 for token in tokens]),
        "start": whole_column([passage["start"] for passage in passages]),
        "tokens": whole_column([len(passage["tokens"]) for passage in passages]),
    }


def _group(
    rows: list[dict[str, Any]], keys: tuple[str, ...], measures: tuple[str, ...], token_lists: tuple[str, ...]
) -> dict[str, Any]:
    """Column by column; lists of all rows one after the other, beside how long each row's is."""
    return {
        **{key: whole_column([row[key] for row in rows]) for key in keys},
        **{name: share_column([row[name] for row in rows]) for name in SHARES + measures},
        "passages": _list([row["passages"] for row in rows], SHARES[1:]),
        **{name: _list([row[name] for row in rows], ("weight",)) for name in token_lists},
    }


def _list(lists: list[list[list[Any]]], values: tuple[str, ...]) -> dict[str, Any]:
    entries = [entry for one in lists for entry in one]
    columns = {name: share_column([entry[at] for entry in entries]) for at, name in enumerate(values, 1)}
    return {
        "counts": whole_column([len(one) for one in lists]),
        "at": whole_column([entry[0] for entry in entries]),
        **columns,
    }
