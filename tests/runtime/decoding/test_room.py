"""The plan of an opened index's memory, beside what is read of it."""

from sparsekv.runtime.cache.layer_rows import LayerRows
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.room import plan_opening


def test_rows_are_those_that_are_read(family_index: OpenIndex) -> None:
    """Of a layer with a sliding window those that the next token can see, and itself."""
    artifact, size = family_index.artifact, 0
    for layer, facts in enumerate(artifact.manifest.layers):
        window = facts.sliding_window
        seen = slice(None if window is None else -window, None)
        size += sum(rows[:, seen].nbytes for rows in LayerRows(artifact, layer).on(family_index.device))
    assert plan_opening(artifact, family_index.model).rows == size
