"""The page of an inspection: facts, clusters as words in their sentences, layers, blocks and lists."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from sparsekv.cli.pages.page import Page
from sparsekv.cli.pages.report_page import report_page
from sparsekv.runtime.reporting.describe import LayerDescription

BROKEN = "\ufffd"
LONGEST = 8  # tokens that one character may take


def inspection_page(
    inspection: dict[str, Any], described: dict[str, list[LayerDescription]], layer: int, texts: Sequence[str]
) -> Page:
    """The page of what `inspect --json` prints.

    Args:
        layer: whose clusters are shown.
        texts: of each token of the prompt; empty where they are not known.
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
    data = {"inspection": inspection, "positions": positions, "texts": [*texts]}
    return report_page(f"What is in {Path(inspection['index']).name}", data, "inspect_clusters.js", "inspect_page.js")


def token_texts(tokenizer: PreTrainedTokenizerBase, input_ids: list[int]) -> list[str]:
    """The text of each token; a character of several tokens is the first one's, and the others are empty."""
    texts: list[str] = []
    start = 0
    while start < len(input_ids):
        length = 1
        text = str(tokenizer.decode(input_ids[start : start + 1]))
        while text.endswith(BROKEN) and length < LONGEST and start + length < len(input_ids):
            length += 1
            text = str(tokenizer.decode(input_ids[start : start + length]))
        whole = not text.endswith(BROKEN)
        texts += [text, *[""] * (length - 1)] if whole else [str(tokenizer.decode(input_ids[start : start + 1]))]
        start += length if whole else 1
    return texts
