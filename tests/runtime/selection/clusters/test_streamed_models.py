"""Models whose new tokens join the clusters while they decode."""

import pytest
import torch
from support.configs import sparse
from support.reference import assert_close
from support.small_index import build_small, plain_logits_after, random_ids, stepped_logits

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.kernels.kmeans.hierarchy import block_offsets
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget

EVERYTHING = Budget(1.0)


@pytest.fixture(scope="module")
def streamed_index(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """A small index of the tiny llama in small blocks of two levels."""
    indexer = MultipoleIndexer(levels=(0.25, 0.0625), block=32)
    return build_small(tmp_path_factory.mktemp("streamed") / "small.skv", methods={"multipole": indexer})


@pytest.mark.parametrize("lookup", ["flat", "hierarchical"])
def test_a_budget_of_everything_gives_the_plain_models_logits_while_blocks_close(
    streamed_index: OpenIndex, lookup: str
) -> None:
    tokens = random_ids(130)
    cache = streamed_index.cache(sparse("multipole", Multipole(lookup, stream=True, buffer=8), EVERYTHING))
    logits = stepped_logits(streamed_index, cache, tokens, question=80)
    assert_close(logits, plain_logits_after(streamed_index, tokens), 1e-4)
    layer = cache.stored_layers[0]
    assert isinstance(layer, SparseLayer)
    assert layer.plan.selector.open_row > block_offsets(streamed_index.split.middle, 32)[-2]


@pytest.mark.parametrize("lookup", ["flat", "hierarchical"])
def test_a_second_question_is_answered_as_by_a_fresh_cache(streamed_index: OpenIndex, lookup: str) -> None:
    method = Multipole(lookup, stream=True, buffer=8)
    used, fresh = (streamed_index.cache(sparse("multipole", method, Budget(0.1))) for _ in range(2))
    first, second = random_ids(54, seed=1), random_ids(34, seed=2)
    stepped_logits(streamed_index, used, first, question=40)
    again, anew = (stepped_logits(streamed_index, cache, second, question=20) for cache in (used, fresh))
    assert torch.equal(again, anew)
    assert used.kv_fraction() == fresh.kv_fraction()


def test_a_cache_used_in_inference_mode_rewinds_outside_of_it(streamed_index: OpenIndex) -> None:
    cache = streamed_index.cache(sparse("multipole", Multipole(stream=True, buffer=8), Budget(0.1)))
    stepped_logits(streamed_index, cache, random_ids(60), question=20)
    cache.rewind()
    assert cache.get_seq_length() == streamed_index.split.tokens


def test_a_method_that_takes_nothing_in_keeps_everything_new_exact(index: OpenIndex) -> None:
    cache = index.cache(sparse("squeezed", Squeezed(), EVERYTHING))
    tokens = random_ids(300)
    assert_close(stepped_logits(index, cache, tokens, question=240), plain_logits_after(index, tokens), 1e-4)
    layer = cache.stored_layers[0]
    assert layer.exact_rows()[0].shape[1] == index.split.sinks + index.split.tail + 300


def test_a_buffer_of_nothing_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="--buffer 0"):
        Multipole(buffer=0)
