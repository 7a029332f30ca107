"""The plan of an opened index's memory, beside what is read of it."""

from pathlib import Path

from support.small_index import build_small

from sparsekv.formats.index.context_rows import OF_TOKENS
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.open import OpenIndex, plan_opening


def test_rows_are_those_that_are_read(family_index: OpenIndex) -> None:
    """A layer with a sliding window counts only the rows that the next token can see."""
    artifact, size = family_index.artifact, 0
    for layer, facts in enumerate(artifact.manifest.layers):
        window = facts.sliding_window
        seen = slice(None if window is None else -window, None)
        size += sum(rows[:, seen].nbytes for rows in LayerRows(artifact, layer).on(family_index.device))
    assert plan_opening(artifact, family_index.model).rows == size


def test_rows_in_8_bits_are_those_that_stay_so(tmp_path: Path) -> None:
    """But for what all keys share, which is little."""
    index = build_small(tmp_path / "int8.skv", kv_dtype="int8")
    stored = [LayerRows(index.artifact, layer).stored.tensors for layer in range(len(index.artifact.manifest.layers))]
    assert plan_opening(index.artifact, index.model).rows == sum(
        one[name].nbytes for one in stored for name in OF_TOKENS
    )
