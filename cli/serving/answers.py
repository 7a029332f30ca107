"""The answers to one request, piece by piece. A client that disconnects ends the answers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from sparsekv.cli.serving.errors import NO_RETRY, ApiError
from sparsekv.runtime.serving.stream import Stream
from sparsekv.runtime.serving.submission import Piece

T = TypeVar("T")


class Answers:
    """The answers of several streams: an asynchronous iterator of (stream number, piece).

    The iteration raises the errors of the streams, and ApiError for an answer that was cancelled or timed out. All
    streams are cancelled after an error, and when the iteration ends early.
    """

    def __init__(self, streams: Sequence[Stream]):
        self._streams, self._pieces = streams, self._merged()

    def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        return self._pieces

    async def first(self) -> tuple[int, Piece]:
        """Return the first piece."""
        return await anext(self._pieces)

    async def close(self) -> None:
        """Cancel the streams that have not ended."""
        for stream in self._streams:
            stream.cancel()
        await self._pieces.aclose()

    async def _merged(self) -> AsyncGenerator[tuple[int, Piece], None]:
        iterators = [aiter(stream) for stream in self._streams]
        waiting = {asyncio.ensure_future(_next(one)): number for number, one in enumerate(iterators)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    number, piece = waiting.pop(task), task.result()
                    yield number, _finished(piece)
                    if piece.finish is None:
                        waiting[asyncio.ensure_future(_next(iterators[number]))] = number
        finally:
            for stream in self._streams:
                stream.cancel()
            await _ended(*waiting)


async def _next(pieces: AsyncIterator[Piece]) -> Piece:
    return await anext(pieces)


def _finished(piece: Piece) -> Piece:
    if piece.finish == "timeout":
        told = "the answer took longer than the server allows (--timeout); ask for a shorter one"
        raise ApiError(504, told, "timeout_error", code="timeout", headers=NO_RETRY)
    if piece.finish == "waited":
        told = "the server was busy: no slot was free within the time that it allows (--timeout); ask again later"
        raise ApiError(503, told, "server_error", code="busy", headers={"Retry-After": "1"})
    if piece.finish == "cancelled":
        raise shut_down()
    return piece


def shut_down() -> ApiError:
    """Return the error for an answer that is incomplete when the server ends."""
    return ApiError(503, "the server shut down before the answer was complete", "server_error", code="shutdown")


async def while_connected(request: Request, wanted: Awaitable[T]) -> T:
    """Await `wanted` and return its result. If the client disconnects, cancel `wanted` and raise `ClientDisconnect`."""
    task = asyncio.ensure_future(wanted)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _ended(task, gone)


async def _ended(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
