"""The size of the prefill's chunks changes nothing: the real model, by 64, by 512 and all at once."""

import pytest
import torch
from support.python_help import DOCUMENT
from support.reference import assert_close

from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.capture.capture import capture

TOKENS = 700


@pytest.mark.parametrize("chunk_size", [64, 512])
def test_chunks_give_the_keys_of_the_whole(embedded: LoadedModel, chunk_size: int) -> None:
    ids = encode_prompt(embedded.tokenizer, DOCUMENT, max_tokens=TOKENS).input_ids
    whole = capture(embedded.model, ids, tail=32, chunk_size=len(ids))
    chunks = capture(embedded.model, ids, tail=32, chunk_size=chunk_size)
    for layer in range(embedded.model.config.num_hidden_layers):
        one, other = whole.take(layer), chunks.take(layer)
        assert_close(other.keys, one.keys, 1e-4)
        assert_close(other.values, one.values, 1e-4)
        assert_close(other.tail, one.tail, 1e-4)
    assert_close(torch.tensor(chunks.probe.logits), torch.tensor(whole.probe.logits), 1e-4)
