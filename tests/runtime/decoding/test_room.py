"""The plan of an opened index's memory, beside what its caches hold."""

from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.room import plan_opening


def test_rows_are_those_that_a_cache_holds(index: OpenIndex) -> None:
    cache = index.dense_cache()
    rows = [rows for layer in cache.stored_layers for rows in layer.exact_rows()]
    assert plan_opening(index.artifact, index.model).rows == sum(one.nbytes for one in rows)
