"""A distributed build: requests of the first rank, and how the other ranks carry them out.

The first rank writes the index. All ranks run the model and build methods, and exchange layers, heads and file
checksums.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch

from sparsekv.formats.distributed.group import Channel, Ranks
from sparsekv.formats.index.context_rows import Pair
from sparsekv.formats.index.folder import Folder, SharedFile
from sparsekv.formats.index.growing_file import ALL_HEADS, HeadPart, RemoteSum
from sparsekv.formats.index.identity import fingerprint_weights
from sparsekv.formats.index.reader import WholeFile, find_whole
from sparsekv.formats.index.schema import LayerFacts, layer_file
from sparsekv.formats.index.writer import SUMS, ArtifactWriter, PartWriter
from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.capture.canary import preflight, run_canary
from sparsekv.indexing.capture.capture import Capture, CapturedLayer, CapturedQueries, capture, rows_as_stored
from sparsekv.indexing.capture.rotation import measure_rotations
from sparsekv.indexing.capture.team import (
    Captured,
    LayerWork,
    MeasureRotations,
    ModelRun,
    RunCanary,
    RunPrompt,
    SharedRows,
    Team,
    TryModel,
    make_layers,
    make_layers_from,
)
from sparsekv.indexing.indexers.interface import Tensors
from sparsekv.kernels.common.states import State

_LAYER, _SUM = 8, 32  # bytes of a message
_UNREADABLE = bytes(_SUM)  # all zeros: the file could not be read; no file has this checksum


class ReceivedSums:
    """The first rank's side of the exchange of checksums: assigns files to ranks in turn, and receives checksums."""

    def __init__(self, ranks: Ranks, channel: Channel):
        self._ranks, self._channel, self._given = ranks, channel, 0

    def give(self) -> int:
        """Return the rank that computes the next file's checksum."""
        self._given += 1
        return (self._given - 1) % self._ranks.size

    def remote(self, layer: int, number: int) -> RemoteSum | None:
        """Return a function that receives the checksum of a layer's file from a rank; None if this rank computes it.

        The functions must be called in the order in which `give` assigned the files.
        """
        return partial(self._receive, layer, number) if number else None

    def _receive(self, layer: int, number: int) -> str | None:
        message = self._channel.receive(_LAYER + _SUM, number)
        if (other := int.from_bytes(message[:_LAYER], "big")) != layer:
            raise RuntimeError(f"rank {number} sent the checksum of layer {other} instead of layer {layer}")
        # If the other rank could not read the file, this rank reads it, and reports the reason if that fails, too.
        return None if message[_LAYER:] == _UNREADABLE else message[_LAYER:].hex()


class SentSums:
    """The other ranks' side of the exchange: computes checksums of files in threads, and sends them in order."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._summing, self._sending = ThreadPoolExecutor(SUMS), ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After an error, do not wait for threads: the first rank may no longer receive, and sending would block.
        for threads in (self._summing, self._sending):
            threads.shutdown(wait=error is None, cancel_futures=error is not None)

    def make(self, layer: int, file: WholeFile) -> None:
        """Compute and send the checksum of a layer's file, in threads."""
        self._sending.submit(self._send, layer, self._summing.submit(file.sha256))

    def _send(self, layer: int, made: Future[str]) -> None:
        try:
            found = bytes.fromhex(made.result())
        except CancelledError:
            return
        except Exception:
            found = _UNREADABLE
        self._channel.send(layer.to_bytes(_LAYER, "big") + found)


Read = Callable[[str], Tensors]


def give_memory_back(device: torch.device) -> None:
    """Release the GPU memory that torch caches but does not use.

    torch keeps freed memory, such as that of captured rows, for the CUDA streams that used it. The threads that read
    layers have their own streams, for which torch would allocate new memory in addition.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def take_turns(ranks: Ranks, work: LayerWork, layers: Sequence[int], read: Read) -> Generator[Tensors, None, None]:
    """Yield a method's tensors of each layer, in order, on the first rank. The ranks build layers in turn.

    Needs the memory of `make_layers_from`, and that of one layer's tensors from another rank.
    """
    with closing(_own(ranks, work, layers, read)) as own:
        for tensors in own:
            yield tensors
            yield from map(dict, ranks.take())


def give_turns(ranks: Ranks, work: LayerWork, layers: Sequence[int], read: Read) -> None:
    """Build every `ranks.size`-th layer, from `ranks.number` on, and send its tensors to the first rank.

    Needs the memory of `make_layers_from`.
    """
    turns = range(0, len(layers), ranks.size)
    with closing(_own(ranks, work, layers, read)) as own:
        for _ in turns:
            ranks.give(next(own, None))  # None: the last turn has fewer layers than there are ranks


def _own(ranks: Ranks, work: LayerWork, layers: Sequence[int], read: Read) -> Generator[Tensors, None, None]:
    device: torch.device = ranks.device
    return make_layers_from(work, layers[ranks.number :: ranks.size], read, device)


def join_layer(ranks: Ranks, own: CapturedLayer) -> CapturedLayer | None:
    """Gather a layer's heads of all ranks on the first rank's device; return None on the other ranks.

    All ranks must call this together, with the same number of heads each.
    """
    keys, values = (ranks.join_heads(rows) for rows in (own.keys, own.values))
    queries = join_queries(ranks, own)
    if keys is None or values is None or queries is None:
        return None
    return CapturedLayer(queries.tail, queries.sink_logits, queries.sample, keys, values)


def join_queries(ranks: Ranks, own: CapturedQueries) -> CapturedQueries | None:
    """Gather a layer's queries, but not its keys and values, of all ranks on the first rank's device; return None on
    the other ranks."""
    tail = ranks.join_heads(own.tail)
    sinks, sample = (None if rows is None else ranks.join_heads(rows) for rows in (own.sink_logits, own.sample))
    return None if tail is None else CapturedQueries(tail, sinks, sample)


@dataclass(frozen=True)
class ShareFiles:
    """Request to open files of the context in an index's folder, and to reply whether that worked.

    If all ranks could open them, each writes its heads' rows to these files during the next prefill.
    """

    folder: Path
    files: Mapping[str, SharedFile]


@dataclass(frozen=True)
class CheckNumbers:
    """Request to reply with the name of a captured tensor that is not finite, or None if all are finite."""


@dataclass(frozen=True)
class SendLayer:
    """Request to send a layer's captured rows and queries, and to free them."""

    layer: int


@dataclass(frozen=True)
class EndLayer:
    """Request to reply when a layer's rows are in its file, to send its captured queries, and to free the layer.

    The rank `summed_by` then computes the file's checksum, and sends it from a thread. If `summed_by` is 0, the first
    rank computes the checksum, unless the file is reused and has one.
    """

    layer: int
    summed_by: int


@dataclass(frozen=True)
class MakeLayers:
    """Request to reply whether this rank can read all files that building these layers reads.

    If all ranks can, each builds every `size`-th layer, where `size` is the number of ranks, and sends it to the first
    rank. `found` has the handles of the files, except those that the ranks have written together.
    """

    work: LayerWork
    layers: Sequence[int]
    folder: Path
    found: Mapping[str, SharedFile]


@dataclass(frozen=True)
class End:
    """Request to end the rank's work, because the build no longer needs the rank."""


Request = ModelRun | ShareFiles | CheckNumbers | SendLayer | EndLayer | MakeLayers | End


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
        """Whether the other ranks can read all files that this work reads. Does not wait for checksums."""
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


def follow(ranks: Ranks, loaded: LoadedModel) -> None:
    """Carry out the first rank's requests until the first rank's build no longer needs this rank.

    During the prefill, this rank allocates its share of the model, and N rows of its own heads in each layer. A layer's
    rows are freed when they are written or sent, and all remaining rows before methods are built. Then this rank
    allocates the memory of `make_layers_from`, for layers with all heads, as the first rank does. In page-locked memory
    of the host, each writing thread allocates 16 MiB, and reading allocates 256 MiB.

    Raises:
        ArtifactError: this rank's rows could not be written, or files could not be read.
        SparsekvError: the model attends in a way that an index does not support.
        UsageError: a method cannot be built for this model.
    """
    # The first rank begins its build with a fingerprint of all weights. This rank computes it, too, because all ranks
    # must gather sharded weights together.
    fingerprint_weights(loaded.model.state_dict().items())
    with ExitStack() as stack:
        writer = stack.enter_context(PartWriter(HeadPart(ranks.number, ranks.size)))
        follower = _Follower(ranks, loaded, writer, stack)
        while follower.does(ranks.share(None)):
            pass


@dataclass
class _Follower:
    """State of a rank between two requests.

    `own` is the capture of the rank's last prefill. `sums` computes the checksums of files that all ranks have written,
    and sends them to the first rank.
    """

    ranks: Ranks
    loaded: LoadedModel
    writer: PartWriter
    stack: ExitStack
    own: Capture | None = None
    sums: SentSums | None = None

    def does(self, request: Request) -> bool:
        """Carry out a request. Returns False if the request ends this rank's work."""
        match request:
            case ShareFiles():
                self._share_files(request)
            case TryModel():
                preflight(self.loaded.model, request.input_ids, self.loaded.name)
            case RunPrompt():
                self.own = self._captured(request)
            case CheckNumbers():
                self.ranks.collect(self._capture.not_finite())
            case RunCanary():
                own = partial(rows_as_stored, self._capture.rows, kv_dtype=request.kv_dtype)
                run_canary(self.loaded.model, request.input_ids, own, self._capture.states)
            case MeasureRotations():
                measure_rotations(self.loaded.model, request.input_ids)
            case SendLayer():
                join_layer(self.ranks, self._capture.take(request.layer))
            case EndLayer():
                self._end_layer(request)
            case MakeLayers():
                self._make_layers(request)
            case _:
                return False
        return True

    def _share_files(self, request: ShareFiles) -> None:
        if all(self.ranks.collect(self.writer.join(request.folder, request.files))):
            self.sums = self.stack.enter_context(SentSums(self.ranks.open_channel()))
        else:
            self.writer.leave()

    @property
    def _capture(self) -> Capture:
        assert self.own is not None
        return self.own

    def _captured(self, request: RunPrompt) -> Capture:
        """Capture a prompt. If the ranks share files, the captured rows are written to them during the prefill."""

        def rows_done(layer: int, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
            self.writer.put(layer_file("context", layer), {"keys": keys, "values": values}, end)

        return capture(self.loaded.model, request.input_ids, **request.options, rows_done=rows_done)

    def _end_layer(self, request: EndLayer) -> None:
        name = layer_file("context", request.layer)
        self.ranks.wait_for_all(partial(self.writer.end, name))
        if request.summed_by == self.ranks.number:
            assert self.sums is not None
            self.sums.make(request.layer, self.writer.whole(name))
        join_queries(self.ranks, self._capture.take_queries(request.layer))

    def _make_layers(self, request: MakeLayers) -> None:
        self.own = None  # frees the captured rows: no later request needs them
        give_memory_back(self.ranks.device)
        found = self._opened(request)
        if not all(self.ranks.collect(found is not None)) or found is None:
            return

        def read(name: str) -> Tensors:
            return (found.get(name) or self.writer.whole(name)).read(self.ranks.device)

        give_turns(self.ranks, request.work, request.layers, read)

    def _opened(self, request: MakeLayers) -> dict[str, WholeFile] | None:
        """Open the request's files, by name; None if a file does not exist here, as on another machine."""
        try:
            folder = Folder(request.folder)
            return {name: find_whole(folder, shared) for name, shared in request.found.items()}
        except OSError:
            return None
