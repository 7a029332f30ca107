"""Render the HTML page of `sparsekv inspect`: facts, layers, and clusters with their characteristic words."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsekv.cli.pages.page import Page, report_page
from sparsekv.runtime.reporting.report import LayerDescription

if TYPE_CHECKING:  # transformers takes seconds to import, and a summary needs no tokenizer
    from transformers import PreTrainedTokenizerBase


def words_of(tokenizer: "PreTrainedTokenizerBase", input_ids: Sequence[int]) -> list[str]:
    """Return the word that each token is part of. A token of only white space or punctuation is a word by itself."""
    from sparsekv.runtime.sources.passages import token_text  # imports transformers, which takes seconds

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
    data = {"inspection": inspection, "positions": positions, "texts": [*texts]}
    return report_page(f"What is in {Path(inspection['index']).name}", data, "inspect_clusters.js", "inspect_page.js")
