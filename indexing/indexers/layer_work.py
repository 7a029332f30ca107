"""What a method's indices are made from: its own numbers, and what it reads of a layer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sparsekv.formats.context_rows import context_rows
from sparsekv.formats.int8_centroids import with_centroids_in_8_bits
from sparsekv.formats.schema import LayerFacts, Split, layer_file
from sparsekv.indexing.indexers.interface import Indexer, LayerInput

Read = Callable[[str], Mapping[str, torch.Tensor]]
"""Returns the tensors of a file of the build by its name, on the device where indices are made."""


@dataclass(frozen=True)
class LayerWork:
    """One method's work on any layer of an index. It can be sent to another process, which then does the same.

    Args:
        name: the method's.
        dtype: the index's, such as `bfloat16`.
        facts: how each layer attends.
        in_8_bits: the index stores keys and values so, and with them the finest clusters' centroids.
    """

    name: str
    indexer: Indexer
    split: Split
    dtype: str
    facts: Sequence[LayerFacts]
    in_8_bits: bool

    def sources(self, layer: int) -> list[str]:
        """The files that the method's file of a layer is made from."""
        folders = ["context", "samples"] if self.indexer.queries_wanted() else ["context"]
        return [layer_file(folder, layer) for folder in folders]

    def files(self, layer: int) -> list[str]:
        """All files that `input` reads."""
        return [*self.sources(layer), layer_file("queries", layer)]

    def input(self, layer: int, read: Read) -> LayerInput:
        """What the layer's indices are made from."""
        stored = context_rows(_lent(read(layer_file("context", layer))), getattr(torch, self.dtype))
        # From what is stored, not from what was captured: a resumed build and a converted index have nothing else.
        keys, values = stored.part(slice(self.split.sinks + self.split.middle))
        lend([keys, values])
        middle = slice(self.split.sinks, self.split.sinks + self.split.middle)
        sample = _lent(read(layer_file("samples", layer))) if self.indexer.queries_wanted() else {}
        return LayerInput(
            keys=keys[:, middle],
            values=values[:, middle],
            facts=self.facts[layer],
            split=self.split,
            queries=sample.get("queries"),
            positions=sample.get("positions"),
            sink_keys=keys[:, : middle.start],
            sink_logits=_lent(read(layer_file("queries", layer))).get("sink_logits"),
        )

    def build(self, layer: int, rows: LayerInput) -> dict[str, torch.Tensor]:
        """The method's tensors of a layer, by name, as they are stored."""
        return self.stored(self.indexer.build_layer(rows))

    def stored(
        self, tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """An indexer's tensors of a layer as they are stored, which continue what is stored before."""
        return with_centroids_in_8_bits(tensors, before) if self.in_8_bits else tensors


def lend(tensors: Iterable[torch.Tensor]) -> None:
    """Let the default stream use tensors that were allocated on a thread's stream."""
    for tensor in tensors:
        if tensor.is_cuda:
            # The thread's stream must not reuse the memory before the default stream is done.
            tensor.record_stream(torch.cuda.default_stream(tensor.device))


def _lent(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    lend(tensors.values())
    return tensors
