"""Decoding with the document's keys and values on the device, in host memory and in the index's files: all the same."""

from functools import partial
from itertools import product

import pytest
import torch
from support.configs import sparse
from support.reference import assert_close
from support.small_index import build_small, random_ids, stepped_logits

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.methods.codes import CodesIndexer
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.indexing.methods.pqcache import PQCacheIndexer
from sparsekv.indexing.methods.squeezed import SqueezedIndexer
from sparsekv.runtime.attention.guard import Guard
from sparsekv.runtime.cache.kv_store import PLACEMENTS
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.pqcache import PQCache
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.methods.tidaldecode import TidalDecode
from sparsekv.runtime.selection.interface import Budget, Method

FAMILIES = ("llama", "gemma2")
INDEXERS = {
    "squeezed": SqueezedIndexer(levels=(0.2, 0.06)),
    "multipole": MultipoleIndexer(levels=(0.25, 0.06), block=80),
    "pqcache": PQCacheIndexer(pq_bytes=4),
    "codes": CodesIndexer(levels=(0.1,), code_bytes=4, iterations=3, query_sample=64),
}
METHODS: dict[str, Method] = {
    "squeezed": Squeezed("hierarchical"),
    "multipole": Multipole(stream=True, buffer=2),
    "quest": Quest(),
    "snapkv": SnapKV(),
    "tidaldecode": TidalDecode(),
    "pqcache": PQCache(rerank=2.0),
    "codes": Codes(),
}


@pytest.fixture(scope="module")
def indices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenIndex]:
    """One by each family."""
    place = tmp_path_factory.mktemp("placed")
    return {family: build_small(place / f"{family}.skv", family, methods=INDEXERS) for family in FAMILIES}


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual, expected)


@pytest.mark.thinned
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("family", "guard"), product(FAMILIES, [None, Guard(0.05)]), ids=str)
def test_it_does_not_matter_where_rows_lie(
    indices: dict[str, OpenIndex], family: str, method: str, guard: Guard | None
) -> None:
    index, tokens = indices[family], random_ids(10)  # of which the buffer above is filled three times
    on_device, *others = (
        index.cache(sparse(method, METHODS[method], Budget(0.1), guard=guard, placement=placement, residual=True))
        for placement in PLACEMENTS
    )
    expected = stepped_logits(index, on_device, tokens, 4)
    # A compiled step reads rows in memory alone, and rounds otherwise than torch does.
    assert_same = partial(assert_close, tolerance=2e-6) if method == "codes" and guard is None else assert_equal
    for cache in others:
        for _ in range(2):
            assert_same(stepped_logits(index, cache, tokens, 4), expected)
        assert cache.kv_fraction() == on_device.kv_fraction()


def test_a_place_that_there_is_not(indices: dict[str, OpenIndex]) -> None:
    with pytest.raises(UsageError, match="--placement tape: choose one of device, host, disk"):
        indices["llama"].cache(sparse("squeezed", Squeezed(), Budget(4), placement="tape"))
