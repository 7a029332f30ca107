"""A model that decodes with centroids for unselected tokens, compared with the definition layer by layer."""

import torch

from sparsekv.formats.index.reader import Artifact
from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.prepare import stored_context
from sparsekv.runtime.selection.interface import Budget, Method

from .configs import sparse
from .reference import relative_error
from .replaced import EXACT, replaced_attention, represented
from .small_index import random_ids
from .small_layer import as_queries


def middle_rows(artifact: Artifact, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values [Hk, M, D] of the tokens that an index covers."""
    split, (keys, values) = artifact.manifest.split, artifact.context(layer)
    middle = slice(split.sinks, split.sinks + split.middle)
    return keys[:, middle], values[:, middle]


class _Checked:
    """A cache's attention, which records the relative error of each output of a sparse layer against the definition."""

    def __init__(self, index: OpenIndex, cache: IndexCache, clusters: str):
        self.index, self.cache, self.clusters = index, cache, clusters
        self.errors: list[float] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        output = self.cache.attend(call)
        layer = self.cache.stored_layers[call.layer]
        if isinstance(layer, SparseLayer):
            self.errors.append(relative_error(output.cpu(), self._expected(call, layer).flatten(0, 1)))
        return output

    def _expected(self, call: AttentionCall, layer: SparseLayer) -> torch.Tensor:
        artifact, (keys, values) = self.index.artifact, layer.exact_rows()
        grouped = call.query.unflatten(0, (len(keys), -1))
        shared = grouped.shape[2] > 1
        first = layer.get_seq_length() - grouped.shape[2]
        selection = layer.plan.selector.select(as_queries(grouped, joint=shared, first=first), layer.plan.budget)
        stands = represented(selection, layer.plan.selector, 0, artifact.manifest.split.middle)
        assert 0 < int((stands == EXACT).sum()) < stands.numel() // 10
        return replaced_attention(
            grouped.cpu(),
            middle_rows(artifact, call.layer),
            (keys.cpu(), values.cpu()),
            stands,
            stored_context(LayerRows(artifact, call.layer), self.clusters).tensors,
            artifact.manifest.layers[call.layer],
            None if call.sink_logits is None else call.sink_logits.view(grouped.shape[:2]).cpu(),
        )


def decoding_errors(index: OpenIndex, name: str, method: Method, clusters: str, budget: Budget) -> list[float]:
    """Return the errors of each sparse layer, for a question of nine tokens and for three further tokens, one by one.

    Args:
        name: the method's name; the clusters of the method `clusters` represent the tokens that it does not select.
    """
    checked = _Checked(index, index.cache(sparse(name, method, budget, residual=True)), clusters)
    with torch.inference_mode(), route_attention(index.model, checked.attend):
        for tokens in random_ids(12).to(index.model.device).split([9, 1, 1, 1]):
            index.model(input_ids=tokens[None], past_key_values=checked.cache, use_cache=True)
    return checked.errors
