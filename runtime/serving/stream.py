"""A request to the scheduler, and the stream of its answer's pieces to a reading thread or asyncio task.

The errors of the queue of requests are also here.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition, Lock
from typing import Literal
from weakref import WeakKeyDictionary

import torch

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.cache.index_cache import LayerStats
from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.decoding.engine import TokenLogprobs
from sparsekv.runtime.decoding.threads import refuse_callback
from sparsekv.runtime.sources.places import Source

Finish = Literal["stop", "length", "timeout", "waited", "cancelled"]
"""Why an answer ended.

`stop`: by an EOS token or a stop string. `length`: a limit of the answer's length was reached, which may be the memory
of its slot (`Lane`). `timeout`: the timeout passed while the request was answered. `waited`: the timeout passed before
the request got a slot. `cancelled`: by the caller.
"""


class QueueFullError(SparsekvError):
    """Raised when the queue of a scheduler is full; `retry_after` is an estimate of the seconds until it has room."""

    def __init__(self, retry_after: float):
        super().__init__(f"too many questions are waiting; ask again in {retry_after:.0f} s")
        self.retry_after = retry_after


@dataclass(frozen=True)
class Submission:
    """A request: a question over one of a scheduler's indices.

    Args:
        index: the name of the index.
        config: the decode config. Requests with the same index and equal configs share steps, if the config allows it.
        tokens: [Q] int64, all token ids after the document: earlier turns, the question, and their chat frames.
        stop: strings that end the answer; the text from the first one on is not delivered.
        logprobs: number of likeliest tokens to return in each token's log-probabilities; None: no log-probabilities are
            returned.
        timeout: seconds after which the answer ends with the finish `timeout` or `waited`; None: no limit.
        sources: maximum number of the answer's sources.
    """

    index: str
    config: DecodeConfig
    tokens: torch.Tensor
    sampling: Sampling
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    timeout: float | None = None
    sources: int = 0


@dataclass(frozen=True)
class Usage:
    """Cost of an answer.

    `prompt_tokens` includes the document and earlier turns. `cached_tokens` is the number of prompt tokens that were
    not prefilled: the document, and earlier turns whose keys and values were still in memory. `kv_fraction` is the
    number of key, value and index rows that the decode steps read, divided by the number that dense attention would
    read; None if there was no decode step. `layers` has the missed mass of each layer if the config measures the missed
    mass. `sources` are the answer's sources, if the request asks for sources.
    """

    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    kv_fraction: float | None
    layers: tuple[LayerStats, ...] = ()
    sources: tuple[Source, ...] = ()

    @property
    def steps(self) -> int:
        """Number of decode steps, which give all tokens but the first."""
        return max(0, self.answer_tokens - 1)


@dataclass(frozen=True)
class Piece:
    """A piece of an answer: the text and the token ids since the previous piece.

    `logprobs` is empty unless the request asks for log-probabilities. Only the last piece has `finish` and `usage`; its
    text may be empty.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    usage: Usage | None = None


class Channel:
    """Passes the pieces of one answer from the scheduler's thread to the readers of its `Stream`.

    A reader sets `cancelled`, which the scheduler reads before each step. Each piece goes to one reader.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self._items: deque[Piece | BaseException] = deque()
        self._complete = False
        self._changed = Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def put(self, item: Piece | BaseException) -> None:
        """Add a piece, or the error that ends the answer."""
        with self._changed:
            self._items.append(item)
            self._complete = isinstance(item, BaseException) or item.finish is not None
            self._changed.notify_all()
            waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            _wake_soon(loop, waiter)

    def get(self) -> Piece | BaseException | None:
        """Wait for the next piece, or for the error that ends the answer; return None after the end."""
        with self._changed:
            while not self._readable():
                self._changed.wait()
            return self._take()

    async def get_async(self) -> Piece | BaseException | None:
        """Wait as `get` does, in an asyncio task."""
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if self._readable():
                    return self._take()
                waiter = loop.create_future()
                self._waiters.append((loop, waiter))
            await waiter

    def _readable(self) -> bool:
        return bool(self._items) or self._complete

    def _take(self) -> Piece | BaseException | None:
        return self._items.popleft() if self._items else None


_LOCK = Lock()
_waking: WeakKeyDictionary[asyncio.AbstractEventLoop, list["asyncio.Future[None]"]] = WeakKeyDictionary()
"""Futures that each event loop must complete. A loop is woken once for all pieces that are put before it wakes up."""


def _wake_soon(loop: asyncio.AbstractEventLoop, waiter: "asyncio.Future[None]") -> None:
    with _LOCK:
        waiters = _waking.setdefault(loop, [])
        waiters.append(waiter)
        if len(waiters) > 1:
            return
    try:
        loop.call_soon_threadsafe(_wake, loop)
    except RuntimeError:  # the loop is closed, and nobody waits
        with _LOCK:
            _waking.pop(loop, None)


def _wake(loop: asyncio.AbstractEventLoop) -> None:
    with _LOCK:
        waiters = _waking.pop(loop, [])
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def refuse_fork(process: int) -> None:
    """Raise UsageError if this process is a fork of `process`, whose threads do not run in a fork."""
    if process != os.getpid():
        raise UsageError(
            "this process was forked after its parent had streamed an answer, and torch's threads do not run in a "
            "fork; start it by `multiprocessing.get_context('spawn')`, and open the index there"
        )


class Stream:
    """The answer to one request: pieces for the iterators of threads or asyncio tasks, during the decoding.

    Several iterators divide the pieces among themselves, and all of them end with the answer. The request is cancelled
    when an iteration ends early, by `break`, an error or a cancelled task. The request is also cancelled when the last
    reference to the stream is dropped.

    Raises:
        UsageError: the reader is a callback of an answer, for which the stream's answer would wait, or the reader is a
            fork of the stream's process, in which nothing decodes the answer.
    """

    def __init__(self, channel: Channel):
        self._channel, self._process = channel, os.getpid()

    def __iter__(self) -> Iterator[Piece]:
        return _Pieces(self)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return _Pieces(self)

    def next(self) -> Piece | None:
        """Wait for the next piece; return None after the last. Raises the error that ended the answer."""
        with self._reading():
            return _raised(self._channel.get())

    async def next_async(self) -> Piece | None:
        """Wait as `next` does, in an asyncio task."""
        with self._reading():
            return _raised(await self._channel.get_async())

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Cancel the request if the read in the context is interrupted. The pieces that are left can still be read."""
        refuse_callback()
        refuse_fork(self._process)
        try:
            yield
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the answer; its slot is free from the next step on. Does nothing if the answer has ended."""
        self._channel.cancelled = True

    def __del__(self) -> None:
        self.cancel()


class _Pieces(Iterator[Piece], AsyncIterator[Piece]):
    """An iteration over the pieces of a stream. The request is cancelled when the iteration is dropped.

    This is no generator, because an exception within a read, such as Ctrl-C, would end a generator. Then the stream's
    last piece could not be read.
    """

    def __init__(self, stream: Stream):
        self._stream = stream

    def __next__(self) -> Piece:
        if (piece := self._stream.next()) is None:
            raise StopIteration
        return piece

    async def __anext__(self) -> Piece:
        if (piece := await self._stream.next_async()) is None:
            raise StopAsyncIteration
        return piece

    def __del__(self) -> None:
        self._stream.cancel()


def _raised(item: Piece | BaseException | None) -> Piece | None:
    if isinstance(item, BaseException):
        raise item
    return item
