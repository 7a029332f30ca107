"""Sums of files that ranks make at the same time, each those of its share: who makes which, and how they are told."""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self

from sparsekv.formats.growing_file import Told, untold
from sparsekv.formats.ranks.channel import Channel
from sparsekv.formats.ranks.ranks import Ranks
from sparsekv.formats.whole_file import WholeFile
from sparsekv.formats.writer import SUMS

_SIZE = 32
_UNREADABLE = bytes(_SIZE)  # no file has this sum


class ToldSums:
    """The first rank's side: gives out the sums of files in turn, and receives those that others make."""

    def __init__(self, ranks: Ranks, channel: Channel):
        self._ranks, self._channel, self._given = ranks, channel, 0

    def give(self) -> int:
        """The number of the rank that makes the next file's sum."""
        self._given += 1
        return (self._given - 1) % self._ranks.size

    def told(self, number: int) -> Told:
        """What receives the next sum of a rank; to be called in the order in which they were given out."""
        return partial(self._receive, number) if number else untold

    def _receive(self, number: int) -> str | None:
        told = self._channel.receive(_SIZE, number)
        # Where it could not read the file, this rank finds that out by itself, and says so.
        return None if told == _UNREADABLE else told.hex()


class MadeSums:
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

    def make(self, file: WholeFile) -> None:
        """Make and send a file's sum."""
        self._sending.submit(self._send, self._summing.submit(file.sha256))

    def _send(self, made: Future[str]) -> None:
        try:
            found = bytes.fromhex(made.result())
        except OSError:
            found = _UNREADABLE
        self._channel.send(found)
