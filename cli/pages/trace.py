"""Write traces as JSON, or as a self-contained HTML page with losslessly packed data."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsekv.cli.common.console import say
from sparsekv.cli.common.options import refuse_impossible_name
from sparsekv.cli.common.streams import json_text
from sparsekv.cli.pages.page import (
    Page,
    budget_text,
    refuse_other_file,
    replace_file,
    share_column,
    whole_column,
    write_page,
)
from sparsekv.formats.errors import UsageError

LISTS = ("passages", "by_token", "by_head", "records")
KEYS = {"by_token": (), "by_head": ("layer", "kv_head"), "records": ("token", "layer", "kv_head")}
TOKEN_LISTS = {"by_token": (), "by_head": (), "records": ("chosen_tokens", "missed_tokens")}
SHARES = ("exact", "chosen", "stood_for", "missed")
MEASURES = {"by_token": (), "by_head": (), "records": ("recall", "attention_mass", "output_error", "kv_fraction")}


def packed_trace(document: dict[str, Any]) -> dict[str, Any]:
    """Return a trace in the packed format that `assets/trace_data.js` reads: `facts`, the prompt, and groups of shares.

    `facts` are all values of the trace except the long lists.
    """
    facts = {name: value for name, value in document.items() if name not in LISTS}
    groups = {name: _group(document[name], KEYS[name], MEASURES[name], TOKEN_LISTS[name]) for name in KEYS}
    budget = budget_text(document["budget"])
    return {"facts": facts, "budget_text": budget, "prompt": _prompt(document["passages"]), **groups}


def _prompt(passages: list[dict[str, Any]]) -> dict[str, Any]:
    """Pack the prompt: the whole text, the length of each token, and the start and number of tokens of each passage.
    Lengths are in UTF-16 units, as in JavaScript."""
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
    """Pack rows column by column. The lists of all rows are concatenated, with the length of each list beside them."""
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


STYLES = ("trace.css", "trace_panel.css", "trace_always.css")
SCRIPTS = (
    "bytes.js",
    "trace_always.js",
    "trace_data.js",
    "trace_shares.js",
    "trace_command.js",
    "trace_document.js",
    "trace_map.js",
    "trace_answer.js",
    "trace_heads.js",
    "trace_numbers.js",
    "trace_list.js",
    "trace_sources.js",
    "trace_search.js",
    "trace_keys.js",
    "trace.js",
)


def write_trace_page(document: dict[str, Any], path: Path) -> int:
    """Write a trace as an HTML page, and return its size in bytes. `document` is the output of `sparsekv trace --json`.

    Raises:
        UsageError: the file name is not valid, or its folder is missing.
        SparsekvError: a file exists that is no page of sparsekv, or the page cannot be written.
    """
    title = f"{document['question']} \u2013 sparsekv trace"
    return write_page(Page(title, packed_trace(document), STYLES, SCRIPTS), path, "--output")


START = '{"version": '
"""The beginning of a trace's JSON. A file that begins like this may be overwritten."""


def write_json(document: dict[str, Any], path: Path) -> int:
    """Write a trace as JSON, whole or not at all, and return its size in bytes. Raises SparsekvError if writing
    fails."""
    return replace_file(path, json_text(document) + "\n", "--output", "trace")


LARGEST_CHANGE = 1_000_000  # factor; a larger change of a probability is shown as over this factor
WRITERS: dict[str, Callable[[dict[str, Any], Path], int]] = {".html": write_trace_page, ".json": write_json}
"""Functions that write a trace and return its size in bytes, by the ending of the file name."""


def refuse_unwritable(output: Path | None, option: str = "--output") -> None:
    """Raise an error if a trace cannot be written to `output`.

    Raises:
        UsageError: the file name has another ending or is not valid, or its folder is missing.
        SparsekvError: a file exists that is no trace of sparsekv.
    """
    if output is None:
        return
    ending = output.suffix.lower()
    if ending not in WRITERS:
        raise UsageError(f"{option} {output}: a trace is written to a file that ends in {' or '.join(WRITERS)}")
    refuse_impossible_name(output, option)
    if ending == ".html":
        refuse_other_file(output, option)
    else:
        refuse_other_file(output, option, "trace", START)


def write(document: dict[str, Any], output: Path) -> int:
    """Write a trace in the format of the file's ending, and return its size in bytes. Raises the errors of the
    format's function in WRITERS."""
    return WRITERS[output.suffix.lower()](document, output)


def say_json(document: dict[str, Any]) -> int:
    """Print a trace as JSON to stdout, and return its size in bytes."""
    text = json_text(document)
    say(text)
    return len(text.encode())


def describe_size(document: dict[str, Any], size: int | None) -> str:
    """Return a line with the numbers of records, tokens, layers and KV heads of a trace. `size` is the number of bytes
    that were written or printed; None: the trace was neither written nor printed."""
    counts = len(document["answer_tokens"]), len(document["layers"]), document["kv_heads"]
    recorded = "{:,} records of {:,} tokens, {} layers and {} KV heads".format(len(document["records"]), *counts)
    return f"{recorded}, {size:,} bytes" if size is not None else f"{recorded}; -o FILE or --json keeps them"


def _told_change(difference: float) -> str:
    """Return how many times as likely an answer is, given a difference of log-probabilities."""
    if difference > math.log(LARGEST_CHANGE):
        return f"over {LARGEST_CHANGE:,}"
    change = math.exp(difference)
    return f"{change:,.0f}" if change > 99 else f"{change:.3g}"


def describe_without(found: dict[str, Any]) -> str:
    """Return a line with the answer that the model gives while the passages of `--without` are hidden.

    The first answer was given with these passages. The line also states how much less or more likely it is without
    them.
    """
    shown, hidden = found["log_probability"]
    likely = f"{_told_change(abs(hidden - shown))} times {'less' if hidden < shown else 'more'} likely"
    return (
        f"without: {' '.join(found['answer'].split())} (the first answer is {likely} then: its log-probability is "
        f"{hidden:.2f} instead of {shown:.2f})"
    )
