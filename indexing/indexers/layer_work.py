"""Build a method's tensors layer by layer: one layer at a time on a GPU, several at a time on a CPU."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import torch

from sparsekv.formats.device import read_ahead
from sparsekv.formats.index.context_rows import context_rows, with_centroids_in_8_bits
from sparsekv.formats.index.schema import LayerFacts, Split, layer_file
from sparsekv.formats.index.writer import ArtifactWriter
from sparsekv.indexing.indexers.cluster_indexer import share_cores
from sparsekv.indexing.indexers.interface import Indexer, LayerInput, Tensors

Read = Callable[[str], Mapping[str, torch.Tensor]]
"""Returns the tensors of a build's file by its name, on the device that builds the methods."""


@dataclass(frozen=True)
class LayerWork:
    """Everything that is needed to build one method's tensors of any layer. It can be sent to another process.

    Args:
        dtype: the index's dtype, such as `bfloat16`.
        in_8_bits: the index stores keys, values and the finest clusters' centroids in int8.
    """

    name: str
    indexer: Indexer
    split: Split
    dtype: str
    facts: Mapping[int, LayerFacts]
    in_8_bits: bool

    def sources(self, layer: int) -> list[str]:
        """List the input files of the method's file of a layer: the layer's context, and the query sample if the method
        needs one."""
        folders = ["context", "samples"] if self.indexer.queries_wanted() else ["context"]
        return [layer_file(folder, layer) for folder in folders]

    def files(self, layer: int) -> list[str]:
        """List all files that `input` reads for a layer."""
        return [*self.sources(layer), layer_file("queries", layer)]

    def input(self, layer: int, read: Read) -> LayerInput:
        """Read a layer's input for the indexer. On a CPU a file's tensors are copied to memory, unless they are aligned
        there."""
        stored = context_rows(_lent(read(layer_file("context", layer))), getattr(torch, self.dtype))
        # Methods are built from stored rows, not captured rows: a resumed build and a converted index have no others.
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

    def build(self, layer: int, rows: LayerInput) -> Tensors:
        """Build the method's tensors of a layer, by name, as they are stored."""
        return self.stored(self.indexer.build_layer(rows))

    def stored(self, tensors: Tensors, before: Tensors | None = None) -> Tensors:
        """Convert an indexer's tensors of a layer to their stored form; they extend the stored tensors `before`."""
        return with_centroids_in_8_bits(tensors, before) if self.in_8_bits else tensors


def lend(tensors: Iterable[torch.Tensor]) -> None:
    """Let the default stream use tensors that were allocated on a thread's stream."""
    for tensor in tensors:
        if tensor.is_cuda:
            # The thread's stream must not reuse the memory before the default stream is done.
            tensor.record_stream(torch.cuda.default_stream(tensor.device))


def _lent(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    lend(tensors.values())
    return {name: _aligned(tensor) for name, tensor in tensors.items()}


ALIGNMENT = 64
"""Bytes. Torch aligns its memory on a CPU to it; a tensor of a mapped file lies anywhere."""


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy of it if it is not aligned in the CPU's memory.

    The rounding of products depends on the alignment. Whether a file's tensors are still in memory depends on how fast
    it is written, and equal builds must be equal.
    """
    return tensor if tensor.is_cuda or tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


T = TypeVar("T")
AHEAD = 2
"""Number of layers that are prefetched while a method is built for a layer."""


LayerMaker = Callable[[LayerWork, Sequence[int], ArtifactWriter, torch.device], Generator[Tensors, None, None]]
"""Yields a method's tensors of each given layer, in order, built on a device from a build's files."""


def make_layers(
    work: LayerWork, layers: Sequence[int], files: ArtifactWriter, device: torch.device
) -> Generator[Tensors, None, None]:
    """Yield a method's tensors of each layer, built in this process alone. This function is a `LayerMaker`."""
    yield from make_layers_from(work, layers, lambda name: files.read(name, device), device)


def make_layers_from(
    work: LayerWork, layers: Sequence[int], read: Callable[[str], Tensors], device: torch.device
) -> Generator[Tensors, None, None]:
    """Yield a method's tensors of each layer, in order.

    Memory: on a GPU, the keys and values of AHEAD + 2 layers, and what the indexer allocates for one layer. On a CPU,
    the same for each of the layers that `share_cores` processes at a time.
    """

    def read_input(layer: int) -> LayerInput:
        return work.input(layer, read)

    if device.type == "cpu":
        indexed = sum(layer.sliding_window is None for layer in work.facts.values())
        yield from share_cores(layers, work.split.middle, lambda layer: work.build(layer, read_input(layer)), indexed)
    else:
        with closing(ahead_on(device, layers, read_input)) as inputs:
            yield from map(work.build, layers, inputs)


def ahead_on(device: torch.device, layers: Sequence[int], read: Callable[[int], T]) -> Generator[T, None, None]:
    """Yield `read(layer)` for each layer, while threads prefetch; AHEAD + 2 layers may be on the device."""

    def use_own_stream() -> None:
        # On the default stream, a copy to the device would wait for the layer that is being built.
        if device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(device))

    def read_whole(layer: int) -> T:
        rows = read(layer)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return rows

    return read_ahead(layers, read_whole, AHEAD, use_own_stream)
