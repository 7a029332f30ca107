"""Show `sparsekv inspect`'s record, which `--json` prints, as tables and as an HTML page."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from sparsekv.cli.common.console import show
from sparsekv.cli.common.streams import printable
from sparsekv.cli.common.tables import titled_table
from sparsekv.cli.pages.page import Page, report_page
from sparsekv.runtime.reporting.report import LayerDescription
from sparsekv.runtime.selection.interface import Budget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Rows = list[dict[str, Any]]


def cluster_summary(rows: Rows) -> Table:
    """Return a table with a row per level of clusters: number, sizes and spread (distance to the centroid)."""
    title = "clusters of all layers; sizes in tokens: the least, the median of medians, the most (--by layer)"
    columns = "level", "clusters", "min", "median", "max", "empty", "of one", "key spread", "value spread"
    table = titled_table(title, (), columns, wrap=True)
    for level in sorted({row["level"] for row in rows}):
        some = [row for row in rows if row["level"] == level]
        combined: dict[str, Callable[[list[float]], float]] = {
            "clusters": sum, "min": min, "median": median, "max": max, "empty": sum, "single": sum,
        }  # fmt: skip
        sizes = (f"{combine([row[name] for row in some]):,.0f}" for name, combine in combined.items())
        table.add_row(str(level), *sizes, *(_spread(some, name) for name in ("key_spread", "value_spread")))
    return table


def list_summary(rows: Rows) -> Table:
    """Return a table of one row about the posting lists of all layers.

    The row has the number of lists and of their entries, and the share of keys in lists. It also has the shares that a
    query's most and least decisive subspaces have in the ranking of keys.
    """
    title = "posting lists of all layers: means, and the least and the most of a layer (--by layer)"
    columns = "lists", "entries each", "keys listed", "in lists", "a query's most", "its least"
    table = titled_table(title, (), columns, wrap=True)
    ranked = {"most": [row["ranked_shares"][0] for row in rows], "least": [row["ranked_shares"][-1] for row in rows]}
    shares = ([row[name] for row in rows] for name in ("keys_listed", "in_lists"))
    table.add_row(
        f"{sum(row['lists'] for row in rows):,}", f"{rows[0]['entries']:,}", *map(_range, [*shares, *ranked.values()])
    )
    return table


def _spread(rows: Rows, name: str) -> str:
    """Format a level's spread (distance to the centroid): mean and range over layers; `none` if a layer has none."""
    values = [row[name] for row in rows]
    return "none" if None in values else _range(values)


def _range(values: Iterable[float]) -> str:
    known = list(values)
    return f"{fmean(known):.3f} ({min(known):.3f} to {max(known):.3f})"


FILES_SHOWN = 10
WORDS_SHOWN = 8
BLOCKS_SHOWN = 6


def print_inspection(inspection: dict[str, Any], *, by_layer: bool) -> None:
    """Print facts about the index. Then print for each method its parameters, the held-out keep rates of its
    thresholds, and the tables of its blocks, clusters and posting lists.

    Args:
        by_layer: print a row for each layer in the tables of clusters and lists, instead of a summary of all layers.
    """
    show(_facts(inspection))
    for name, method in inspection["methods"].items():
        parameters = ", ".join(f"{key} {value}" for key, value in method["parameters"].items())
        show("", Text.assemble((printable(name), "bold"), f": {printable(parameters)}"))
        show(f"default budget: {Budget(method['default_budget']).told(inspection['split']['middle'])}")
        show(*_held_out(method["calibration"]))
        for part, table in (TABLES | (BY_LAYER if by_layer else {})).items():
            if method[part]:
                show(table(method[part]))


def _weights(weights: str | None) -> str:
    return "" if weights is None else f", {weights} weights"


def _facts(inspection: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, fact in facts_of(inspection).items():
        table.add_row(name, fact)
    return table


def facts_of(inspection: dict[str, Any]) -> dict[str, str]:
    """Return what table and page say of an index as a whole: a text for each name."""
    split, layers, sizes = inspection["split"], inspection["layers"], inspection["bytes"]
    facts = {
        "index": f"{inspection['index']} (built {inspection['created']})",
        "model": f"{inspection['model']['id']}, {inspection['dtype']}" + _weights(inspection["model"]["weights"]),
        **(
            {}
            if inspection["kv_storage"] is None
            else {"keys and values": _storage(inspection["kv_storage"], layers["attending"])}
        ),
        "rope": str(inspection["rope"]["scaling"] or "as the model has it"),
        "tokens": f"{split['tokens']:,}: {split['sinks']} sinks, {split['middle']:,} indexed, {split['tail']} tail",
        **({"cut": _cut(inspection)} if inspection["cut_after"] is not None else {}),
        **({} if inspection["files"] is None else {"files": _files(inspection)}),
        "chat template": "around document and question" if inspection["chat_template"] else "none (--raw)",
        **({} if inspection["prefill"]["exact"] else {"prefill": inspection["prefill"]["kind"]}),
        "layers": f"{layers['all']}, {layers['indexed']} of them indexed",
        **({"states": _states(inspection)} if inspection["states"] else {}),
        "size": f"{sum(sizes.values()) / 1e6:,.1f} MB: "
        + ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in sizes.items()),
        "sha256": "every file is right" if inspection["verified"] else "not rechecked (--verify)",
    }
    if inspection["defaults"] is not None:
        facts["default"] = _default(inspection["defaults"])
    return facts


def _files(inspection: dict[str, Any]) -> str:
    """Return a line with the number of a document's files, their order, and the largest files with their tokens."""
    files, history = inspection["files"], inspection["file_history"]
    by_tokens = sorted(files, key=lambda file: file["start"] - file["stop"])[:FILES_SHOWN]
    named = ", ".join(f"{file['path']} {file['stop'] - file['start']:,}{' (cut)' * file['cut']}" for file in by_tokens)
    order = f" in the order {history['order']}" if history else ""
    return f"{len(files):,}{order}; most tokens: {named}{', ...' * (len(files) > FILES_SHOWN)}"


def _cut(inspection: dict[str, Any]) -> str:
    """Return a line that says where a document was cut, and which of its files are cut or missing."""
    behind = inspection["files_behind"]
    parts = [f"after {inspection['cut_after']:,} tokens of the document (--max-tokens)"]
    parts += [f"{file['path']} goes on" for file in inspection["files"] or () if file["cut"]]
    if behind:
        some = f"{', '.join(behind[:FILES_SHOWN])}{', ...' * (len(behind) > FILES_SHOWN)}"
        parts.append(f"{len(behind):,} file{'s' * (len(behind) != 1)} not in it: {some}")
    return "; ".join(parts)


def _states(inspection: dict[str, Any]) -> str:
    """Return a line with the numbers of tokens after which the layers' states are stored, and each state's size."""
    places = inspection["states"]
    each = inspection["bytes"]["states"] / len(places) / 1e6
    return f"{each:,.2f} MB after each of {', '.join(f'{tokens:,}' for tokens in places)} tokens"


def _storage(storage: dict[str, Any], layers: list[int]) -> str:
    """Return a line about the int8 storage of keys and values: the mean error, and the worst layer's error.

    `layers` are the numbers of the layers to which the errors of `storage` belong.
    """
    errors = storage["layers"]
    worst = layers[errors.index(max(errors))]
    return (
        f"in {storage['dtype']}: output error of dense attention {storage['error']:.4f}, "
        f"{max(errors):.4f} in layer {worst}, measured on {storage['measured_tokens']:,} tokens"
    )


def _default(setting: dict[str, Any]) -> str:
    """Return a line with the default setting that `tune` wrote."""
    target, by_layer = setting["target"], ", on average over layers" if setting["layer_budgets"] else ""
    of = "" if target["of"] is None else f" of the oracle's best {Budget(target['of'])}"
    return (
        f"{setting['method']} {setting['variant']}".strip() + f" at {100 * setting['budget']:.3g}%{by_layer}: "
        f"{target['measure']} {setting['held_out']:.4f}{of} on the held-out half, for a target of {target['value']:g}, "
        f"kv fraction {setting['kv_fraction']:.3f}"
    )


def _held_out(calibration: dict[str, Any]) -> list[str]:
    """Return a line for each held-out keep rate in a nested calibration record. The line begins with the keys that
    lead to the rate."""
    lines = []
    for key, value in calibration.items():
        if key == "held_out_keep":
            lines.append(f"threshold for {value['target']:.1%} keeps {value['kept']:.1%} on held-out queries")
        elif isinstance(value, dict):
            lines += [f"{key} {line}" for line in _held_out(value)]
    return lines


def _blocks(blocks: list[dict[str, Any]]) -> Table:
    """Return a table with a row per block. Of many blocks, only the first blocks and the last two are shown, because
    closed blocks are similar."""
    columns = "block", "from token", "to", "tokens", "clusters a KV head", ""
    table = titled_table("blocks, clustered one by one", (), columns, wrap=True)
    for number, block in enumerate(blocks):
        if BLOCKS_SHOWN - 2 <= number < len(blocks) - 2:
            if number == BLOCKS_SHOWN - 2:
                table.add_row("...")
            continue
        numbers = (number, block["start"], block["stop"] - 1, block["tokens"], block["clusters"])
        table.add_row(*(f"{number:,}" for number in numbers), "open" if block["open"] else "")
    return table


def _sizes(rows: list[dict[str, Any]]) -> Table:
    title = "tokens in a cluster, and how far keys and values are from its centroids, over all KV heads"
    counted = "clusters", "min", "median", "p99", "max", "empty", "of one"
    table = titled_table(title, (), ("layer", "level", *counted, "key spread", "value spread"), wrap=True)
    for row in rows:
        sizes = (f"{row[name]:,.0f}" for name in ("clusters", "min", "median", "p99", "max", "empty", "single"))
        spreads = ("none" if row[name] is None else f"{row[name]:.3f}" for name in ("key_spread", "value_spread"))
        table.add_row(str(row["layer"]), str(row["level"]), *sizes, *spreads)
    return table


def _clusters(which: str, clusters: list[dict[str, Any]]) -> Table:
    title = f"{which} clusters of layer {clusters[0]['layer']}"
    table = titled_table(title, (), ("KV head", "tokens", "key spread"), wrap=True)
    table.add_column("words, most telling first", overflow="fold")
    for cluster in clusters:
        words = list(cluster["words"].items())[:WORDS_SHOWN]
        text = "  ".join(f"{word} {count}" for word, count in words)
        table.add_row(str(cluster["kv_head"]), str(cluster["tokens"]), f"{cluster['key_spread']:.3f}", text)
    return table


def _lists(rows: list[dict[str, Any]]) -> Table:
    subspaces = len(rows[0]["subspace_shares"])
    title = (
        f"lists, over all KV heads, and what the {subspaces} subspaces give to the order of keys "
        f"(an even share is {1 / subspaces:.3f})"
    )
    counted, ranked_by = ("lists", "entries", "keys listed", "in lists"), ("a query's most", "its least")
    by_subspace = "most", "of subspace", "least", "of subspace"
    table = titled_table(title, (), ("layer", *counted, *by_subspace, *ranked_by), wrap=True)
    for row in rows:
        shares, ranked = row["subspace_shares"], row["ranked_shares"]
        table.add_row(
            str(row["layer"]),
            *(f"{row[name]:,}" for name in ("lists", "entries")),
            *(f"{row[name]:.3f}" for name in ("keys_listed", "in_lists")),
            *(text for share in (max(shares), min(shares)) for text in (f"{share:.3f}", str(shares.index(share)))),
            *(f"{share:.3f}" for share in (ranked[0], ranked[-1])),
        )
    return table


TABLES: dict[str, Callable[[Rows], Table]] = {
    "blocks": _blocks,
    "layers": cluster_summary,
    "biggest": partial(_clusters, "biggest"),
    "most_spread": partial(_clusters, "most spread"),
    "lists": list_summary,
}
"""Functions that make the table of each part of a method's record."""
BY_LAYER = {"layers": _sizes, "lists": _lists}
"""Functions that replace those of `TABLES`, for tables with a row per layer."""


def words_of(tokenizer: "PreTrainedTokenizerBase", input_ids: Sequence[int]) -> list[str]:
    """Return the word that each token is part of. A token of only white space or punctuation is a word by itself."""
    from sparsekv.runtime.sources.places import token_text  # imports transformers, which takes seconds

    known = {token: token_text(tokenizer, token) for token in set(input_ids)}
    texts = [known[token] for token in input_ids]
    words: list[str] = []
    start = 0
    for position in range(1, len(texts) + 1):
        if position == len(texts) or not _continues(texts[position - 1], texts[position]):
            word = "".join(texts[start:position])
            words += [word.strip() or repr(word)] * (position - start)
            start = position
    return words


def _continues(before: str, text: str) -> bool:
    return before[-1:].isalnum() and text[:1].isalnum()


def telling_words(words: Sequence[str], positions: Iterable[int]) -> dict[str, int]:
    """Return the words at `positions` with their counts there, the most over-represented words first (G-test)."""
    overall, here = Counter(words), Counter(words[position] for position in positions)
    total, inside = len(words), here.total()

    def surprise(word: str) -> float:
        return here[word] * math.log(here[word] / inside * total / overall[word])

    return {word: here[word] for word in sorted(here, key=surprise, reverse=True)}


def inspection_page(
    inspection: dict[str, Any], described: dict[str, list[LayerDescription]], layer: int, texts: Sequence[str]
) -> Page:
    """Render the HTML page of the output of `inspect --json`.

    Args:
        layer: the layer whose clusters are shown.
        texts: the text of each token of the prompt; empty if the texts are not known.
    """
    positions = {
        name: {
            kind: [cluster.positions for cluster in getattr(one.clusters, kind)]
            for one in found
            if one.layer == layer and one.clusters is not None
            for kind in ("biggest", "most_spread")
        }
        for name, found in described.items()
    }
    data = {"inspection": inspection, "facts": facts_of(inspection), "positions": positions, "texts": [*texts]}
    return report_page(f"What is in {Path(inspection['index']).name}", data, "inspect_clusters.js", "inspect_page.js")
