"""The real model decodes 1,024 tokens while they join the lists: recall over old and new keys stays what it was."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import pytest
import torch
from support.command import sparsekv
from support.configs import sparse
from support.reference import attention_probabilities

from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import LoadedModel, identify
from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.kernels.common.row_operations import expand_runs
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.open import open_index
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.selection.interface import Budget, Queries

STEPS, TOGETHER = 1024, 16


def _recall(call: AttentionCall, layer: SparseLayer) -> float:
    """Share of the oracle's tokens, of all that the middle holds by now, that the layer's selector chooses."""
    middle, exact = layer.plan.middle.from_row(0)[0], layer.exact_rows()[0]
    grouped = call.query.unflatten(0, (len(middle), -1))
    keys = torch.cat([middle, exact], 1)
    probability = attention_probabilities(grouped, keys, call.softmax_scale).mean(1)[..., : middle.shape[1]]
    tokens = layer.plan.budget.tokens(middle.shape[1])
    oracle = torch.zeros_like(probability, dtype=torch.bool)
    oracle.scatter_(-1, probability.topk(tokens, -1).indices, True)
    logits = call.softmax_scale * torch.einsum("hgqd,htd->hgqt", grouped, exact)
    asked = Queries(
        grouped, lambda: torch.tensor([layer.get_seq_length() - 1]), lambda: logits.logsumexp(-1), joint=False
    )
    chosen = layer.plan.selector.select(asked, layer.plan.budget)
    rows, _ = expand_runs(chosen.rows.starts, chosen.rows.lengths, chosen.rows.capacity)
    return float(oracle.gather(-1, rows).double().sum(-1).mean() / tokens)


@dataclass
class _Measured:
    """A cache's attention, and each layer's recall in the first and the last steps of all."""

    cache: IndexCache
    steps: int
    step: int = 0
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        output, layer = self.cache.attend(call), self.cache.stored_layers[call.layer]
        assert isinstance(layer, SparseLayer)
        if self.step < TOGETHER:
            self.first.append(_recall(call, layer))
        elif self.step >= self.steps - TOGETHER:
            self.last.append(_recall(call, layer))
        return output


@pytest.mark.slow
def test_recall_stays_what_it_was_at_the_start(
    long_index: Artifact, document: Path, embedded: LoadedModel, tmp_path: Path
) -> None:
    folder = tmp_path / "lists.skv"
    shutil.copytree(long_index.folder, folder)
    command = ("build-index", document, "-o", folder, "--max-tokens", "6144", "--method", "csattention", "-q")
    assert sparsekv(*command, cwd=tmp_path).returncode == 0
    index = open_index(Artifact(folder), embedded.model, embedded.tokenizer, identify(embedded))
    text = document.read_text(encoding="utf-8")
    new = encode_prompt(embedded.tokenizer, text, max_tokens=6144 + STEPS).input_ids[index.split.tokens :]
    cache = index.cache(sparse("csattention", CSAttention(rerank=1.0, stream=True), Budget(0.05)))
    measured = _Measured(cache, len(new))
    with torch.inference_mode(), route_attention(index.model, measured.attend):
        for token in new:
            index.model(input_ids=token.view(1, 1), past_key_values=cache, use_cache=True)
            measured.step += 1
    layer = cache.stored_layers[0]
    assert isinstance(layer, SparseLayer)
    assert layer.plan.middle.used > index.split.middle + STEPS - 256
    print(f"recall {fmean(measured.first):.3f} at the start, {fmean(measured.last):.3f} at the end")
    assert fmean(measured.last) >= 0.9 * fmean(measured.first)
