"""Requests of a build's first rank to the other ranks, and the exchange of layers, heads and file checksums."""

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch

from sparsekv.formats.distributed.group import Channel, Ranks
from sparsekv.formats.index.folder import SharedFile
from sparsekv.formats.index.growing_file import RemoteSum
from sparsekv.formats.index.reader import WholeFile
from sparsekv.formats.index.writer import SUMS
from sparsekv.indexing.capture.capture import CapturedLayer, CapturedQueries
from sparsekv.indexing.capture.team import ModelRun
from sparsekv.indexing.indexers.interface import Tensors
from sparsekv.indexing.indexers.layer_work import LayerWork, make_layers_from

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
