"""The cache of a model that decodes over a stored context: dense layers, sparse layers, and what comes after."""

from dataclasses import dataclass

import torch
from transformers import Cache

from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.cache.graphs import ModelGraph
from sparsekv.runtime.cache.stored_layer import Slot, StoredLayer


@dataclass(frozen=True)
class LayerStats:
    """One layer's queries since `rewind`: the share of attention that they left by estimate, mean over heads, and the
    shares of heads that a guard gave a higher budget, or everything."""

    layer: int
    missed: float
    raised: float
    dense: float


class IndexCache(Cache):
    """Stored layers as a transformers cache; `attend` is the attention function to route a model's calls to.

    Between `reserve` and `release` each layer takes one row a step, in a slot that is told on the device, so that the
    step can be captured: `graph` is the one that was captured last. `captures` is False once it was tried in vain.
    """

    def __init__(self, layers: list[StoredLayer]):
        super().__init__(layers=list(layers))
        self.stored_layers = layers
        self.graph: ModelGraph | None = None
        self.captures = True
        first = layers[0].keys
        assert first is not None
        self.rows = torch.zeros(len(layers), dtype=torch.int64, device=first.device)
        self.counts = torch.zeros_like(self.rows, dtype=torch.int32)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self.stored_layers[call.layer].attend(call)

    @property
    def capturable(self) -> bool:
        """Whether one decode step, captured, may stand for all."""
        return self.captures and all(layer.capturable for layer in self.stored_layers)

    def reserve(self, tokens: int) -> None:
        """From now on rows come one at a time; there is room for so many, in buffers that may be new for it."""
        for number, layer in enumerate(self.stored_layers):
            one = slice(number, number + 1)
            layer.reserve(Slot(self.rows[one], self.counts[one]), tokens)
        used = torch.tensor([layer.used for layer in self.stored_layers])
        self.rows.copy_(used)
        self.counts.copy_(used + 1)

    def room_left(self) -> int:
        """How many more rows the buffers hold."""
        return min(layer.room_left() for layer in self.stored_layers)

    def advance_on_device(self) -> None:
        """The end of a step, as a part of it."""
        self.rows += 1
        self.counts += 1

    def advance(self) -> None:
        """What the host has to know of a step that is done, or replayed."""
        for layer in self.stored_layers:
            layer.advance()

    def release(self) -> None:
        """Rows come as they like again."""
        for layer in self.stored_layers:
            layer.release()

    def counters(self) -> list[torch.Tensor]:
        """All that a step changes on the device, beside the row that it writes."""
        read = [one for layer in self.stored_layers if layer.read is not None for one in layer.read.counters()]
        return [self.rows, self.counts, *read]

    def buffers(self) -> tuple[int, ...]:
        """What tells whether a captured step still knows where rows lie."""
        return tuple(number for layer in self.stored_layers for number in layer.buffers())

    def rewind(self) -> None:
        """Back to the stored context, ready for the next question."""
        for layer in self.stored_layers:
            layer.rewind()

    def kv_fraction(self) -> float:
        """Rows read for the middle over those dense attention reads, over all decode steps since `rewind`; one sync."""
        counts = [layer.read for layer in self.stored_layers if layer.read is not None]
        dense = sum(count.dense for count in counts)
        return (sum(count.total() for count in counts)) / dense if dense else 0.0

    def stats(self) -> list[LayerStats]:
        """What each layer missed that measures it; one sync a layer."""
        measured = ((number, layer.missed()) for number, layer in enumerate(self.stored_layers))
        return [LayerStats(number, *shares) for number, shares in measured if shares is not None]
