"""The cache of a model that decodes over a stored context: dense layers, sparse layers, and what comes after."""

from dataclasses import dataclass

import torch
from transformers import Cache

from sparsekv.kernels.hook import AttentionCall
from sparsekv.runtime.sparse_layer import SparseLayer
from sparsekv.runtime.stored_layer import StoredLayer


@dataclass(frozen=True)
class LayerStats:
    """One layer's queries since `rewind`: the share of attention that they left by estimate, mean over heads, and the
    shares of heads that a guard gave a higher budget, or everything."""

    layer: int
    missed: float
    raised: float
    dense: float


class IndexCache(Cache):
    """Stored layers as a transformers cache; `attend` is the attention function to route a model's calls to."""

    def __init__(self, layers: list[StoredLayer]):
        super().__init__(layers=list(layers))
        self.stored_layers = layers

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self.stored_layers[call.layer].attend(call)

    def rewind(self) -> None:
        """Back to the stored context, ready for the next question."""
        for layer in self.stored_layers:
            layer.rewind()

    def kv_fraction(self) -> float:
        """Rows read for the middle over those dense attention reads, over all decode steps since `rewind`; one sync."""
        counts = [layer.read for layer in self.stored_layers if isinstance(layer, SparseLayer)]
        dense = sum(count.dense for count in counts)
        return (sum(count.total() for count in counts)) / dense if dense else 0.0

    def stats(self) -> list[LayerStats]:
        """What each layer with a gauge left; one sync a layer."""
        return [
            LayerStats(number, *layer.gauge.means())
            for number, layer in enumerate(self.stored_layers)
            if isinstance(layer, SparseLayer) and layer.gauge is not None
        ]
