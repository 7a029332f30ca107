"""Run the first rank of a distributed build. It writes the index, and all ranks run the model and build methods."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sparsekv.formats.distributed.group import Ranks
from sparsekv.formats.index.context_rows import Pair
from sparsekv.formats.index.folder import SharedFile
from sparsekv.formats.index.growing_file import ALL_HEADS, HeadPart, RemoteSum
from sparsekv.formats.index.schema import LayerFacts, layer_file
from sparsekv.formats.index.writer import ArtifactWriter
from sparsekv.indexing.capture.capture import Capture, CapturedLayer, CapturedQueries
from sparsekv.indexing.capture.team import Captured, ModelRun, SharedRows, Team
from sparsekv.indexing.distributed.requests import (
    CheckNumbers,
    End,
    EndLayer,
    MakeLayers,
    ReceivedSums,
    SendLayer,
    ShareFiles,
    give_memory_back,
    join_layer,
    join_queries,
    take_turns,
)
from sparsekv.indexing.indexers.interface import Tensors
from sparsekv.indexing.indexers.layer_work import LayerWork, make_layers
from sparsekv.kernels.common.states import State


class SplitRows(SharedRows):
    """Writes the rows of a model whose KV heads are split over ranks: each rank writes its own heads."""

    own: Capture | None = None
    """The capture of this rank's last prefill."""
    files = frozenset[str]()
    """Names of the files that all ranks write. Once all ranks have written a file, every rank can read the file."""
    _sums: ReceivedSums

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def share(self, folder: Path, files: Mapping[str, SharedFile]) -> bool:
        self.ranks.share(ShareFiles(folder, files))
        shared = all(self.ranks.collect(True))
        if shared:
            self.files, self._sums = frozenset(files), ReceivedSums(self.ranks, self.ranks.open_channel())
        return shared

    def end(self, layer: int, written: Callable[[float], bool]) -> tuple[CapturedQueries, RemoteSum | None]:
        """Wait until all ranks have written a layer's rows; after that no rank writes to the layer's file."""
        assert self.own is not None
        # A reused file already has a checksum.
        number = self._sums.give() if layer_file("context", layer) in self.files else 0
        self.ranks.share(EndLayer(layer, number))
        # The file may only become part of the index once all ranks have written their rows. A call that receives the
        # ranks' queries is no proof: on a GPU it returns before the queries have arrived.
        self.ranks.wait_for_all(written)
        joined = join_queries(self.ranks, self.own.take_queries(layer))
        assert joined is not None
        return joined, self._sums.remote(layer, number)


class Leader(Team):
    """Team of the first rank and the other ranks.

    The first rank asks the others to run the model with it, to send the heads that they captured, and to build methods'
    tensors.

    Args:
        split: the KV heads are split over the ranks. Otherwise each rank captures all heads.
    """

    starts_after_prefix = False  # a prefix is prefilled again, because the other ranks cannot read its stored rows

    def __init__(self, ranks: Ranks, *, split: bool):
        self.ranks, self.part = ranks, HeadPart(ranks.number, ranks.size) if split else ALL_HEADS
        self._rows = self.shared_rows = SplitRows(ranks) if split else None
        self._released = False

    def begin(self, run: ModelRun) -> None:
        self.ranks.share(run)

    def whole(self, own: Capture) -> Captured:
        if self._rows is None:
            return own
        self._rows.own = own
        return JoinedCapture(self.ranks, own)

    def make_layers(
        self, work: LayerWork, layers: Sequence[int], files: ArtifactWriter, device: torch.device
    ) -> Generator[Tensors, None, None]:
        """Yield a method's tensors of layers, which all ranks build in turn if all of them can read the files.

        Otherwise this rank releases the others, and builds these and all later tensors alone.
        """
        give_memory_back(device)
        if layers and not self._released:
            if self._others_read(work, layers, files):
                return take_turns(self.ranks, work, layers, lambda name: files.read(name, device))
            # The other ranks would otherwise wait for this rank's work, possibly for hours.
            self.release()
        return make_layers(work, layers, files, device)

    def release(self) -> None:
        if not self._released:
            self._released = True
            self.ranks.share(End())

    def _others_read(self, work: LayerWork, layers: Sequence[int], files: ArtifactWriter) -> bool:
        """Whether the other ranks can read all files that this work reads, without waiting for checksums."""
        shared = self._rows.files if self._rows else frozenset()
        context = {layer_file("context", layer) for layer in layers} - shared
        if any(files.is_new(name) for name in context):
            return False
        names = {name for layer in layers for name in work.files(layer)} - shared
        self.ranks.share(MakeLayers(work, layers, files.folder, {name: files.find(name) for name in sorted(names)}))
        return all(self.ranks.collect(True))


@dataclass(frozen=True)
class JoinedCapture:
    """A capture whose heads are divided among the ranks. `take` gathers one layer's heads from all ranks."""

    ranks: Ranks
    own: Capture

    @property
    def states(self) -> Mapping[int, State]:
        return self.own.states

    def facts(self, layer: int) -> LayerFacts:
        return self.own.facts(layer)

    def not_finite(self) -> str | None:
        """Name a tensor with an infinity or NaN on any rank; None if all are finite."""
        self.ranks.share(CheckNumbers())
        return next((wrong for wrong in self.ranks.collect(self.own.not_finite()) if wrong), None)

    def rows(self, layer: int) -> Pair:
        """Return the rows of this rank's heads."""
        return self.own.rows(layer)

    def take(self, layer: int) -> CapturedLayer:
        self.ranks.share(SendLayer(layer))
        joined = join_layer(self.ranks, self.own.take(layer))
        assert joined is not None
        return joined
