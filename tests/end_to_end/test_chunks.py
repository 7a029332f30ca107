"""The size of the prefill's chunks changes nothing: the real model, by 64, by 512 and all at once."""

import pytest
import torch
from support.python_help import DOCUMENT
from support.reference import assert_close

from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.formats.index.manifest import top_logits
from sparsekv.formats.index.schema import Probe
from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.capture.capture import CapturedLayer, capture

TOKENS = 560
Captured = tuple[list[CapturedLayer], Probe]


def _captured(loaded: LoadedModel, chunk_size: int) -> Captured:
    """All layers of the prefilled document."""
    ids = encode_prompt(loaded.tokenizer, DOCUMENT, max_tokens=TOKENS).input_ids
    captured = capture(loaded.model, ids, tail=32, chunk_size=chunk_size)
    return [captured.take(layer) for layer in range(loaded.model.config.num_hidden_layers)], top_logits(captured.logits)


@pytest.fixture(scope="module")
def whole(embedded: LoadedModel) -> Captured:
    """All layers of the document, prefilled in one chunk."""
    return _captured(embedded, TOKENS + 100)


@pytest.mark.parametrize("chunk_size", [pytest.param(64, marks=pytest.mark.slow), 512])
def test_chunks_give_the_keys_of_the_whole(embedded: LoadedModel, whole: Captured, chunk_size: int) -> None:
    layers, probe = _captured(embedded, chunk_size)
    for other, one in zip(layers, whole[0], strict=True):
        assert one.keys.shape[1] > 512
        assert_close(other.keys, one.keys, 1e-4)
        assert_close(other.values, one.values, 1e-4)
        assert_close(other.tail, one.tail, 1e-4)
    assert_close(torch.tensor(probe.logits), torch.tensor(whole[1].logits), 1e-4)
