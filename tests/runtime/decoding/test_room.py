"""The plan of an opened index's memory, beside what is read of it."""

from sparsekv.runtime.cache.layer_rows import LayerRows
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.room import plan_opening


def test_rows_are_those_that_are_read(index: OpenIndex) -> None:
    layers = range(len(index.artifact.manifest.layers))
    rows = [rows for layer in layers for rows in LayerRows(index.artifact, layer).on(index.device)]
    assert plan_opening(index.artifact, index.model).rows == sum(one.nbytes for one in rows)
