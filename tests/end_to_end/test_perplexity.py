"""Tests of the cost of multipole's centroids to the real model: the perplexity of a text after the indexed one."""

from pathlib import Path

import pytest
import torch
from filelock import FileLock
from support.configs import sparse

from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import LoadedModel, identify
from sparsekv.indexing.build import build_index
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.indexing.plan import BuildConfig, BuildPlan
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.decoding.perplexity import perplexity
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.window import Window
from sparsekv.runtime.selection.interface import Budget

DOCUMENT, CONTINUATION = 6144, 1024


@pytest.fixture(scope="module", params=[MultipoleIndexer().block, 2048], ids=lambda block: f"blocks of {block}")
def opened(request: pytest.FixtureRequest, embedded: LoadedModel, document: Path) -> OpenIndex:
    """The first 6,144 tokens as they are, without a chat template, in one block and in several."""
    folder, text = document.parent / f"raw-{request.param}.skv", document.read_text(encoding="utf-8")
    prompt = encode_prompt(embedded.tokenizer, text, raw=True, max_tokens=DOCUMENT)
    with FileLock(f"{folder}.building"):
        config = BuildConfig({"multipole": MultipoleIndexer(block=request.param)})
        build_index(BuildPlan(embedded, prompt, config), folder)
    return open_index(Artifact(folder), embedded.model, embedded.tokenizer, identify(embedded))


@pytest.fixture(scope="module")
def continuation(embedded: LoadedModel, document: Path) -> torch.Tensor:
    """The next 1,024 tokens."""
    text = document.read_text(encoding="utf-8")
    prompt = encode_prompt(embedded.tokenizer, text, raw=True, max_tokens=DOCUMENT + CONTINUATION)
    return prompt.input_ids[DOCUMENT:]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["exact", "streaming"])
def test_perplexity_at_ten_percent_is_within_two_percent_of_dense(
    opened: OpenIndex, continuation: torch.Tensor, stream: bool
) -> None:
    dense = perplexity(opened, opened.dense_cache(), continuation)
    cache = opened.cache(sparse("multipole", Multipole(stream=stream), Budget(0.1)))
    assert perplexity(opened, cache, continuation) == pytest.approx(dense, rel=0.02)
    assert 0.1 < cache.kv_fraction() < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("opened", [2048], indirect=True)
def test_without_the_document_the_text_is_harder_to_predict(opened: OpenIndex, continuation: torch.Tensor) -> None:
    """So that two percent say something: sinks, tail and the text itself are not enough."""
    dense = perplexity(opened, opened.dense_cache(), continuation)
    window = opened.cache(sparse("window", Window(), Budget(0.1)))
    assert perplexity(opened, window, continuation) > 1.04 * dense
