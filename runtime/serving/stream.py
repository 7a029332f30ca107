"""The stream of an answer's pieces from the decoding thread to a reading thread or asyncio task."""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from threading import Condition, Lock
from weakref import WeakKeyDictionary

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.decoding.threads import refuse_callback
from sparsekv.runtime.serving.submission import Piece


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

    A generator would end when a read is interrupted, and could not return the last piece.
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
