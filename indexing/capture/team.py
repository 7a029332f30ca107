"""The processes that build an index: this process alone, or this process as the leader of others.

The processes build a method's tensors layer by layer: one layer at a time on a GPU, several at a time on a CPU.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from sparsekv.formats.device import read_ahead
from sparsekv.formats.index.context_rows import Pair, context_rows, with_centroids_in_8_bits
from sparsekv.formats.index.folder import SharedFile
from sparsekv.formats.index.growing_file import ALL_HEADS, HeadPart, RemoteSum
from sparsekv.formats.index.layout import form_fault, value_fault
from sparsekv.formats.index.schema import KVDtype, LayerFacts, Split, layer_file
from sparsekv.formats.index.writer import ArtifactWriter
from sparsekv.formats.registry import told_of, wrong_class
from sparsekv.indexing.capture.capture import Capture, CapturedLayer, CapturedQueries
from sparsekv.indexing.indexers.cluster_indexer import share_cores
from sparsekv.indexing.indexers.interface import Indexer, LayerInput, Tensors
from sparsekv.kernels.common.states import State

Read = Callable[[str], Mapping[str, torch.Tensor]]
"""Function that returns the tensors of a build's file, given its name, on the device that builds the methods."""


@dataclass(frozen=True)
class LayerWork:
    """Inputs for building one method's tensors of any layer; a `LayerWork` can be sent to another process.

    Args:
        name: the method's name.
        dtype: the index's dtype, such as `bfloat16`.
        facts: each layer's attention settings, such as its softmax scale.
        in_8_bits: whether the index stores keys, values and the finest clusters' centroids in int8.
    """

    name: str
    indexer: Indexer
    split: Split
    dtype: str
    facts: Mapping[int, LayerFacts]
    in_8_bits: bool

    def sources(self, layer: int) -> list[str]:
        """List the files from which a layer's tensors are built: its context and, if needed, its query sample."""
        folders = ["context", "samples"] if self.indexer.queries_wanted() else ["context"]
        return [layer_file(folder, layer) for folder in folders]

    def files(self, layer: int) -> list[str]:
        """List all files that `input` reads for a layer."""
        return [*self.sources(layer), layer_file("queries", layer)]

    def input(self, layer: int, read: Read) -> LayerInput:
        """Read a layer's input for the indexer. On a CPU, tensors that are not aligned in memory are copied."""
        stored = context_rows(_lent(read(layer_file("context", layer))), getattr(torch, self.dtype))
        # Methods are built from stored rows, not from captured rows, which a resumed build or a converted index does
        # not have.
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
        """Build the method's tensors of a layer, by name, in their stored form. Raises the errors of `checked`."""
        return self.stored(self.checked(layer, rows, lambda: self.indexer.build_layer(rows)))

    def checked(self, layer: int, rows: LayerInput, make: Callable[[], Tensors]) -> Tensors:
        """Return the indexer's tensors of a layer, which `make` returns.

        Raises:
            SparsekvError: an index with these tensors could not be read, or an indexer of another package fails.
        """
        kind, what = type(self.indexer), f"layer {layer} of {self.name}"
        with told_of(kind):
            tensors = make()
        fault = form_fault(tensors, self.split, rows.keys, self.dtype, what)
        if fault is None:
            # An indexer on a GPU may return tensors in the CPU's memory, such as offsets of blocks.
            placed = {name: tensor.to(rows.keys.device) for name, tensor in tensors.items()}
            fault = value_fault(placed, self.split, what)
        if fault is not None:
            raise wrong_class(kind, fault)
        return tensors

    def stored(self, tensors: Tensors, before: Tensors | None = None) -> Tensors:
        """Convert an indexer's tensors of a layer to the tensors that the index stores.

        If the index stores int8, the centroids of the finest clusters are converted; otherwise nothing changes.

        Args:
            before: the stored tensors that an append has extended; their int8 scales may be used again.
        """
        return with_centroids_in_8_bits(tensors, before) if self.in_8_bits else tensors


def lend(tensors: Iterable[torch.Tensor]) -> None:
    """Make tensors that a thread allocated on its own CUDA stream safe to use on the default stream."""
    for tensor in tensors:
        if tensor.is_cuda:
            # The thread's stream must not reuse the memory before the default stream is done.
            tensor.record_stream(torch.cuda.default_stream(tensor.device))


def _lent(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    lend(tensors.values())
    return {name: _aligned(tensor) for name, tensor in tensors.items()}


ALIGNMENT = 64
"""Alignment in bytes of CPU memory that torch allocates. A tensor of a mapped file may have any alignment."""


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if the tensor is not aligned in the CPU's memory.

    The rounding of matrix products depends on the alignment. Whether a file's tensors come from memory or from the
    mapped file depends on how fast files are written. Without aligned copies, repeated builds could differ.
    """
    return tensor if tensor.is_cuda or tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


T = TypeVar("T")
AHEAD = 2
"""Number of layers that are prefetched while a method is built for a layer."""


LayerMaker = Callable[[LayerWork, Sequence[int], ArtifactWriter, torch.device], Generator[Tensors, None, None]]
"""Function that yields a method's tensors of each layer, in order, built on a device from a build's files."""


def make_layers(
    work: LayerWork, layers: Sequence[int], files: ArtifactWriter, device: torch.device
) -> Generator[Tensors, None, None]:
    """Yield a method's tensors of each layer, built in this process alone; the `LayerMaker` without other processes."""
    yield from make_layers_from(work, layers, lambda name: files.read(name, device), device)


def make_layers_from(
    work: LayerWork, layers: Sequence[int], read: Callable[[str], Tensors], device: torch.device
) -> Generator[Tensors, None, None]:
    """Yield a method's tensors of each layer, in order.

    On a GPU, this allocates the keys and values of AHEAD + 2 layers, and the indexer's memory for one layer. On a CPU,
    it allocates the keys, the values and the indexer's memory for each of the layers that `share_cores` processes at a
    time.
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


class Captured(Protocol):
    """The interface of a finished prefill; `Capture` is its implementation for one process with the whole model."""

    @property
    def states(self) -> Mapping[int, State]: ...

    def facts(self, layer: int) -> LayerFacts: ...

    def not_finite(self) -> str | None: ...

    def rows(self, layer: int) -> Pair: ...

    def take(self, layer: int) -> CapturedLayer: ...


@dataclass(frozen=True)
class TryModel:
    """Request to run the forward passes of `preflight` over input_ids [N]."""

    input_ids: torch.Tensor


@dataclass(frozen=True)
class RunPrompt:
    """Request to prefill input_ids [N] with the arguments `options` of `capture`, and to hold the captured rows."""

    input_ids: torch.Tensor
    options: Mapping[str, Any]


@dataclass(frozen=True)
class RunCanary:
    """Request to run the passes of `run_canary` over input_ids [N] and the captured rows, rounded to `kv_dtype`."""

    input_ids: torch.Tensor
    kv_dtype: KVDtype | None


@dataclass(frozen=True)
class MeasureRotations:
    """Request to run the forward passes of `measure_rotations` over input_ids [N]."""

    input_ids: torch.Tensor


ModelRun = TryModel | RunPrompt | RunCanary | MeasureRotations
"""Request for a run of the model. All processes that share the model must start the run together."""


class SharedRows(ABC):
    """Lets processes, each of which captures a part of the heads, write their rows to the same files of an index."""

    @abstractmethod
    def share(self, folder: Path, files: Mapping[str, SharedFile]) -> bool:
        """Let all processes open an index's files, given by name; return whether every process could open all files.

        If all processes could, each writes its heads' rows of the next capture to these files.
        """

    @abstractmethod
    def end(self, layer: int, written: Callable[[float], bool]) -> tuple[CapturedQueries, RemoteSum | None]:
        """Wait until all processes have written a layer's rows, and free the captured rows.

        Args:
            written: waits for a number of seconds, and returns whether this process has written its rows.

        Returns:
            The layer's queries, and a function that waits for the checksum of the layer's file from another process.
            Instead of the function, None if this process computes the checksum, or if the file is reused and has one.
        """


class Team(ABC):
    """The processes that run the model. Starts each run in all processes, and joins the heads that they capture."""

    part: HeadPart
    """Part of the heads that this process captures."""
    shared_rows: SharedRows | None
    """Lets the processes write their heads' rows to the same files. None if each process captures all heads, and this
    process writes all rows."""
    starts_after_prefix: bool
    """Whether a prefill can start after tokens whose keys and values the index in the build's folder has."""

    @property
    def has_all_heads(self) -> bool:
        """Whether this process captures all heads."""
        return self.part == ALL_HEADS

    @abstractmethod
    def begin(self, run: ModelRun) -> None:
        """Start a run of the model in the other processes; called just before this process makes the same run."""

    @abstractmethod
    def whole(self, own: Capture) -> Captured:
        """Return this process's capture, joined with the heads that other processes have captured."""

    @abstractmethod
    def make_layers(
        self, work: LayerWork, layers: Sequence[int], files: ArtifactWriter, device: torch.device
    ) -> Generator[Tensors, None, None]:
        """Yield a method's tensors of layers, built by this process or others; a `LayerMaker`."""

    @abstractmethod
    def release(self) -> None:
        """Let the other processes end, because this process needs no more work from them."""


class Alone(Team):
    """Team of this process alone, which has the whole model."""

    part, shared_rows, starts_after_prefix = ALL_HEADS, None, True

    def begin(self, run: ModelRun) -> None:
        """Do nothing: there are no other processes."""

    def whole(self, own: Capture) -> Captured:
        return own

    def make_layers(
        self, work: LayerWork, layers: Sequence[int], files: ArtifactWriter, device: torch.device
    ) -> Generator[Tensors, None, None]:
        return make_layers(work, layers, files, device)

    def release(self) -> None:
        """Do nothing: no other process waits."""
