"""Answers to one request, piece by piece, and bodies of responses in the format of OpenAI's API.

A client that disconnects ends its answers.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer
from starlette.requests import ClientDisconnect, Request

from sparsekv.cli.serving.errors import NO_RETRY, ApiError
from sparsekv.runtime.serving.stream import Piece, Stream

Finish = Literal["stop", "length"]


class Sent(BaseModel):
    """Base class of response bodies. Every field of a response is declared.

    OMITTED: fields that are left out if they are None. Other fields are null if they are None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    OMITTED: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _sent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {name: one for name, one in fields.items() if one is not None or name not in self.OMITTED}


class CachedTokens(Sent):
    """Number of prompt tokens that were not prefilled for this answer.

    These are the document, and earlier turns of the conversation whose keys and values were kept.
    """

    cached_tokens: int


class UsageSent(Sent):
    """Numbers of tokens. The prompt includes the document."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class LayerGauge(Sent):
    """Missed mass of a layer: the estimated share of attention on tokens that steps dropped or gave to centroids."""

    layer: int
    missed: float


class Gauge(Sent):
    """Missed mass of the answers: the estimated share of attention on tokens that steps dropped or gave to centroids.
    `missed` is the mean of all layers."""

    missed: float
    layers: list[LayerGauge]


class SourceSent(Sent):
    """A passage of the document that an answer attended to.

    `index` is the answer's index among the choices. `lines` are the passage's first and last line in the file, `page`
    is its page of a PDF, and `tokens` are its tokens [start, stop) of the stored prompt. `score` is the passage's share
    of the retrieval heads' attention.
    """

    index: int
    path: str
    lines: tuple[int, int]
    page: int | None
    tokens: tuple[int, int]
    text: str
    score: float


class Details(Sent):
    """Method and budget of the answers. kv_fraction is the mean share of the document's keys and values read.

    It is null if no answer took a decode step.
    Decode steps that at least `dense_from` answers shared attended densely.
    """

    OMITTED = ("dense_from", "gauge", "sources")

    method: str
    budget: float | int
    kv_fraction: float | None
    dense_from: int | None = None
    gauge: Gauge | None = None
    sources: list[SourceSent] | None = None


class Alternative(Sent):
    """A token's text, its UTF-8 bytes (null if the token is only a part of a character), and its log-probability."""

    token: str
    bytes: list[int] | None
    logprob: float


class TokenChoice(Alternative):
    """A token of an answer with the likeliest tokens at its position."""

    top_logprobs: list[Alternative]


class ChatLogprobs(Sent):
    """Log-probabilities of a chat completion's tokens."""

    content: list[TokenChoice]
    refusal: None = None


class AnswerMessage(Sent):
    """The message of a chat completion."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Sent):
    """One of the answers to a conversation."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish


class ChatCompletion(Sent):
    """The answer of `/v1/chat/completions` without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageSent
    sparsekv: Details


class Delta(Sent):
    """The part of an answer's message that an event of a stream adds."""

    OMITTED = ("role", "content")

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoiceDelta(Sent):
    """The part of one of the answers that an event of a stream adds."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatCompletionChunk(Sent):
    """An event of `/v1/chat/completions` with `stream`."""

    OMITTED = ("usage", "sparsekv")

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChoiceDelta]
    usage: UsageSent | None = None
    sparsekv: Details | None = None


class TextLogprobs(Sent):
    """Log-probabilities of a completion's tokens.

    `text_offset` has the tokens' positions in the answer, in characters. If several tokens in `top_logprobs` have the
    same text, all but the likeliest are named as in the vocabulary.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Sent):
    """One of the continuations of a prompt; in a stream, the part of it that an event adds.

    `finish_reason` is null before the last event.
    """

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Finish | None = None


class Completion(Sent):
    """The response of `/v1/completions`, or with `stream` one event."""

    OMITTED = ("usage", "sparsekv")

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageSent | None = None
    sparsekv: Details | None = None


class ModelDetails(Sent):
    """Details of an index: the model that answers, the number of tokens of the document, the methods that can answer,
    and the default method and budget. Decode steps that at least `dense_from` answers share attend densely."""

    OMITTED = ("dense_from",)

    model: str
    tokens: int
    methods: list[str]
    method: str
    budget: float | int
    dense_from: int | None = None


class ModelSent(Sent):
    """An index, listed as a model of `/v1/models`. An index that is not open has no details, and `created` is 0."""

    OMITTED = ("sparsekv",)

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["sparsekv"] = "sparsekv"
    sparsekv: ModelDetails | None = None


class ModelList(Sent):
    """The answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelSent]


class IndexClosed(Sent):
    """The response of `DELETE /v1/indices/{name}`, in OpenAI's format for a deleted model. Files are not deleted."""

    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


class Health(Sent):
    """The answer of `/health`."""

    status: Literal["ok", "draining"]


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
