"""Passes of dense attention over several tokens of one sequence; on a GPU they are captured as CUDA graphs."""

from collections.abc import Sequence

import torch

from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.attention.sparse_layer import PackedDense, PackedSparse, SparseLayer
from sparsekv.runtime.cache.dense_layer import DenseLayer
from sparsekv.runtime.cache.index_cache import Fed, IndexCache
from sparsekv.runtime.cache.packed_cache import PackedCache, PackedLayer, SlotRows
from sparsekv.runtime.cache.stored_layer import StoredLayer
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.step import DecodeStep


def verifies_in_place(cache: IndexCache) -> bool:
    """Whether dense attention can read all rows of a cache in place, on a GPU; a pass can then be captured."""
    layers = cache.stored_layers
    if not all(layer.keys.is_cuda and layer.keys.shape == layer.values.shape for layer in layers):
        return False
    sparse = (layer for layer in layers if isinstance(layer, SparseLayer))
    return all(layer.plan.middle.in_place() is not None for layer in sparse)


class VerifyingCache(PackedCache):
    """The cache of passes of dense attention over up to `tokens` tokens of the sequence of an `IndexCache`.

    A pass is a step of a `PackedCache` whose tokens all have the same slot, in neighbouring rows. The slot's rows are
    the buffers of the sequence's own layers. So the sequence has the rows of a pass without a copy, once
    `IndexCache.count_written` counts them.
    """

    def __init__(self, alone: IndexCache, tokens: int):
        super().__init__(alone, [_verifying_layer(layer) for layer in alone.stored_layers], tokens)
        self._bound: list[torch.Tensor] = []
        """The keys' buffer of each layer whose rows the slot has."""

    def reserve(self, needed: int, most: int, *, capture: bool) -> bool:
        same = bool(self._bound) and needed <= self.packed[0].own.capacity
        if same and all(layer.keys is one for layer, one in zip(self.stored_layers, self._bound, strict=True)):
            return False
        for layer in self.stored_layers:
            layer.make_room(layer.first + max(needed, min(most, needed + self.ROOM)))
        # Layers of one step must have slots of one capacity.
        capacity = min(layer.keys.shape[1] - layer.first for layer in self.stored_layers)
        for layer, packed in zip(self.stored_layers, self.packed, strict=True):
            after = slice(layer.first, layer.first + capacity)
            packed.own = SlotRows(layer.keys[None, :, after], layer.values[None, :, after])
        self._bound = [layer.keys for layer in self.stored_layers]
        return True

    def buffers(self) -> tuple[int, ...]:
        addresses = (one.data_ptr() for layer in self.packed for one in (layer.own.keys, layer.own.values))
        return self.packed[0].own.capacity, *addresses

    def advance(self) -> None:
        """Count no rows read: `DraftingEngine` tells that dense attention reads all of them."""


def _verifying_layer(layer: StoredLayer) -> PackedLayer:
    if isinstance(layer, SparseLayer):
        return PackedSparse(layer, 1, dense_from=1)
    assert isinstance(layer, DenseLayer)
    return PackedDense(layer, 1)


class Verification:
    """Feeds a sequence's tokens in passes of dense attention, over an `IndexCache` for which `verifies_in_place`.

    Args:
        tokens: maximum number of tokens of a pass.
    """

    def __init__(self, index: OpenIndex, cache: IndexCache, tokens: int):
        self.model, self.cache, self.verifying = index.model, cache, VerifyingCache(cache, tokens)
        self.step = DecodeStep(index.model, self.verifying, index.split.tokens)

    def logits(self, first: int, tokens: Sequence[int], most: int) -> torch.Tensor:
        """Return the logits [T, V] after each of the fed tokens. The next call may overwrite them.

        Args:
            first: row of the first token after the stored context.
            most: maximum number of such rows at the end of the answer.
        """
        self.cache.release()
        fed = [Fed(0, first + place, [token], asks=False) for place, token in enumerate(tokens)]
        with route_attention(self.model, self.verifying.attend):
            logits = self.step(fed, torch.tensor(tokens), most)
        self.cache.count_written(len(tokens))
        return logits
