"""The real model decodes 1,500 tokens while they join the clusters: the error against dense attention does not grow."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import pytest
import torch
from support.configs import sparse
from support.reference import reference_attention

from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import LoadedModel, identify
from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.kernels.kmeans.hierarchy import block_offsets
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.open import open_index
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.selection.interface import Budget

STEPS, EVERY, TOGETHER = 1500, 100, 10


@dataclass
class _Measured:
    """A cache's attention, and each layer's mean error over its heads against dense attention: at every hundredth step
    and at the nine after it."""

    cache: IndexCache
    step: int = 0
    errors: dict[int, list[float]] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        output = self.cache.attend(call)
        if self.step % EVERY < TOGETHER:
            dense = _dense(call, self.cache)
            error = (output.double() - dense).norm(dim=-1) / dense.norm(dim=-1)
            self.errors.setdefault(self.step, []).append(float(error.mean()))
        return output


def _layer(cache: IndexCache, number: int) -> SparseLayer:
    layer = cache.stored_layers[number]
    assert isinstance(layer, SparseLayer)
    return layer


def _dense(call: AttentionCall, cache: IndexCache) -> torch.Tensor:
    """Dense attention [Hq, Q, D] over all rows that the cache holds."""
    layer = _layer(cache, call.layer)
    keys, values = (
        torch.cat([middle, exact], 1)
        for middle, exact in zip(layer.plan.middle.from_row(0), layer.exact_rows(), strict=True)
    )
    query = call.query.unflatten(0, (len(keys), -1))
    return reference_attention(query, keys, values, call.softmax_scale).flatten(0, 1)


@pytest.mark.slow
def test_the_error_stays_what_it_was_at_the_start(long_index: Artifact, document: Path, embedded: LoadedModel) -> None:
    """At 5%, in blocks of 2,048, of which the last closes on the way; the text that comes is the document's own."""
    index = open_index(long_index, embedded.model, embedded.tokenizer, identify(embedded))
    text = document.read_text(encoding="utf-8")
    new = encode_prompt(embedded.tokenizer, text, max_tokens=6144 + STEPS).input_ids[index.split.tokens :]
    cache = index.cache(sparse("multipole", Multipole(stream=True), Budget(0.05)))
    measured = _Measured(cache)
    with torch.inference_mode(), route_attention(index.model, measured.attend):
        for step, token in enumerate(new):
            measured.step = step
            index.model(input_ids=token.view(1, 1), past_key_values=cache, use_cache=True)
    errors = torch.tensor([fmean(layers) for layers in measured.errors.values()]).view(-1, TOGETHER)
    assert len(errors) == STEPS // EVERY
    # A step alone shows the claim, and several the same with less of what its own query does.
    assert errors[:, 0].max() <= 1.5 * errors[0, 0]
    assert errors.mean(1).max() <= 1.5 * errors[0].mean()
    layer = _layer(cache, 0)
    assert layer.plan.middle.used > index.split.middle + STEPS - 256
    assert layer.plan.selector.open_row > block_offsets(index.split.middle, 2048)[-2]
