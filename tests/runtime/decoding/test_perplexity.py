"""Perplexity of a text after the stored prompt: transformers' own loss, and a choice for each token."""

import math
from pathlib import Path

import pytest
import torch
from support.configs import sparse
from support.small_index import build_small, random_ids, stepped_logits
from torch.nn.functional import cross_entropy

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.perplexity import DENSE_CHUNK, perplexity
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget


@torch.inference_mode()
def _transformers(index: OpenIndex, continuation: torch.Tensor) -> float:
    """exp of transformers' own loss on document and continuation, of which only the continuation counts."""
    index.model.set_attn_implementation("eager")
    ids = torch.cat([index.input_ids, continuation])[None]
    labels = ids.clone()
    labels[:, : len(index.input_ids)] = -100
    return math.exp(float(index.model(input_ids=ids, labels=labels, use_cache=False).loss))


@pytest.mark.parametrize("tokens", [1, 2, 2 * DENSE_CHUNK + 90])
def test_dense_perplexity_is_that_of_transformers(family_index: OpenIndex, tokens: int) -> None:
    continuation = random_ids(tokens)
    measured = perplexity(family_index, family_index.dense_cache(), continuation)
    assert measured == pytest.approx(_transformers(family_index, continuation), rel=1e-4)


def test_a_budget_of_everything_gives_the_perplexity_of_transformers(family_index: OpenIndex) -> None:
    continuation = random_ids(60)
    cache = family_index.cache(sparse("squeezed", Squeezed(), Budget(1.0)))
    measured = perplexity(family_index, cache, continuation)
    assert measured == pytest.approx(_transformers(family_index, continuation), rel=1e-4)


def test_each_token_of_a_sparse_cache_makes_its_own_choice(index: OpenIndex) -> None:
    continuation, dense = random_ids(60), index.dense_cache()
    cache = index.cache(sparse("squeezed", Squeezed(), Budget(0.05)))
    first = perplexity(index, dense, continuation[:1])
    logits = stepped_logits(index, cache, continuation[:-1], question=1)
    losses = cross_entropy(logits, continuation[1:], reduction="sum")
    expected = math.exp((math.log(first) + float(losses)) / 60)
    measured = perplexity(index, cache, continuation)
    assert measured == pytest.approx(expected, rel=1e-6)
    assert measured != pytest.approx(perplexity(index, dense, continuation), rel=1e-3)


def test_measuring_again_gives_the_same_while_tokens_join_the_clusters(tmp_path: Path) -> None:
    index = build_small(tmp_path / "small.skv", methods={"multipole": MultipoleIndexer(levels=(0.25,), block=64)})
    cache = index.cache(sparse("multipole", Multipole(stream=True, buffer=8), Budget(0.1)))
    continuation = random_ids(50)
    assert perplexity(index, cache, continuation) == perplexity(index, cache, continuation)


def test_nothing_has_no_perplexity(index: OpenIndex) -> None:
    with pytest.raises(UsageError, match="no text to measure perplexity on"):
        perplexity(index, index.dense_cache(), random_ids(0))
