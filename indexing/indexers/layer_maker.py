"""What a method makes of each layer: on a GPU of one after the other, on a CPU of several at a time."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from sparsekv.formats.ahead import read_ahead
from sparsekv.formats.unfinished_file import SharedFile
from sparsekv.indexing.indexers.cores import share_cores
from sparsekv.indexing.indexers.interface import LayerInput
from sparsekv.indexing.indexers.layer_work import LayerWork

T = TypeVar("T")
Tensors = dict[str, torch.Tensor]
AHEAD = 2
"""Layers that are read while a method is built for one."""


class BuildFiles(Protocol):
    """The files of a build under way, by name; see `ArtifactWriter`."""

    folder: Path

    def read(self, name: str, device: torch.device) -> dict[str, torch.Tensor]: ...

    def is_new(self, name: str) -> bool: ...

    def find(self, name: str) -> SharedFile: ...


LayerMaker = Callable[[LayerWork, Sequence[int], BuildFiles, torch.device], Generator[Tensors, None, None]]
"""Yields what a method makes of each of some layers, in order, on a device, from the files of a build."""


def make_layers(
    work: LayerWork, layers: Sequence[int], files: BuildFiles, device: torch.device
) -> Generator[Tensors, None, None]:
    """The `LayerMaker` of one process."""
    yield from make_layers_from(work, layers, lambda name: files.read(name, device), device)


def make_layers_from(
    work: LayerWork, layers: Sequence[int], read: Callable[[str], Tensors], device: torch.device
) -> Generator[Tensors, None, None]:
    """Yields what a method makes of each layer, in order.

    Memory: on a GPU AHEAD + 2 layers' keys and values, and what the indexer takes for one; on a CPU what `share_cores`
    has at a time.
    """

    def read_input(layer: int) -> LayerInput:
        return work.input(layer, read)

    if device.type == "cpu":
        indexed = sum(layer.sliding_window is None for layer in work.facts)
        yield from share_cores(layers, work.split.middle, lambda layer: work.build(layer, read_input(layer)), indexed)
    else:
        with closing(ahead_on(device, layers, read_input)) as inputs:
            yield from map(work.build, layers, inputs)


def ahead_on(device: torch.device, layers: Sequence[int], read: Callable[[int], T]) -> Generator[T, None, None]:
    """Yields `read(layer)` for each layer; threads read the next ones, so AHEAD + 2 may be on the device."""

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
