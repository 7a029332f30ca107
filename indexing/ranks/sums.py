"""Sums of files that ranks make at the same time, each those of its share, and send to the first rank."""

from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self

from sparsekv.formats.growing_file import RemoteSum
from sparsekv.formats.ranks.channel import Channel
from sparsekv.formats.ranks.ranks import Ranks
from sparsekv.formats.whole_file import WholeFile
from sparsekv.formats.writer import SUMS

_LAYER, _SUM = 8, 32  # bytes of a message
_UNREADABLE = bytes(_SUM)  # no file has this sum


class ReceivedSums:
    """The first rank's side: gives out the sums of layers' files in turn, and receives those that others make."""

    def __init__(self, ranks: Ranks, channel: Channel):
        self._ranks, self._channel, self._given = ranks, channel, 0

    def give(self) -> int:
        """The number of the rank that makes the next file's sum."""
        self._given += 1
        return (self._given - 1) % self._ranks.size

    def remote(self, layer: int, number: int) -> RemoteSum | None:
        """What receives the sum of a layer's file from a rank, to be called in the order in which sums were given out;
        None for those of this rank."""
        return partial(self._receive, layer, number) if number else None

    def _receive(self, layer: int, number: int) -> str | None:
        message = self._channel.receive(_LAYER + _SUM, number)
        if (other := int.from_bytes(message[:_LAYER], "big")) != layer:
            raise RuntimeError(f"rank {number} sent the sum of layer {other} in the place of {layer}")
        # Where it could not read the file, this rank finds that out by itself, and says so.
        return None if message[_LAYER:] == _UNREADABLE else message[_LAYER:].hex()


class SentSums:
    """Another rank's side: makes sums in threads, and sends them in order.

    Args:
        channel: to the first rank.
    """

    def __init__(self, channel: Channel):
        self._channel = channel
        self._summing, self._sending = ThreadPoolExecutor(SUMS), ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the first rank may receive no more, until it is ended for that.
        for threads in (self._summing, self._sending):
            threads.shutdown(wait=error is None, cancel_futures=error is not None)

    def make(self, layer: int, file: WholeFile) -> None:
        """Make and send the sum of a layer's file."""
        self._sending.submit(self._send, layer, self._summing.submit(file.sha256))

    def _send(self, layer: int, made: Future[str]) -> None:
        try:
            found = bytes.fromhex(made.result())
        except CancelledError:
            return
        except Exception:
            found = _UNREADABLE
        self._channel.send(layer.to_bytes(_LAYER, "big") + found)
