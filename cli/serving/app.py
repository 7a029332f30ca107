"""The HTTP app: OpenAI's endpoints over a scheduler, with endpoints for health and measures."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

import torch
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparsekv.cli.common.console import note
from sparsekv.cli.common.failures import describe
from sparsekv.cli.serving import requests
from sparsekv.cli.serving.errors import NO_RETRY, ApiError, failure
from sparsekv.cli.serving.forms import About, ChatForm, Form, TextForm, Whole, gauge_of
from sparsekv.cli.serving.limits import Gate, read_body
from sparsekv.cli.serving.metrics import Metrics
from sparsekv.cli.serving.requests import Asked, ChatRequest, CompletionRequest, IndexRequest, parsed
from sparsekv.cli.serving.responses import Answers, Health, IndexClosed, ModelList, Sent, shut_down, while_connected
from sparsekv.cli.serving.shelf import Served, Shelf, described, find, listed, unknown
from sparsekv.formats.documents.prompt import may_reason
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.serving import messages
from sparsekv.runtime.serving.scheduler import Scheduler
from sparsekv.runtime.serving.stream import Piece, QueueFullError, Stream, Submission, Usage

CLIENT_GONE = 499
"""Status under which a request is counted if its client disconnected. The status is never sent."""
Endpoint = Callable[[Request], Awaitable[Response]]
SYSTEM_ROLES = {"developer": "system"}


@dataclass(frozen=True)
class Limits:
    """Restrictions on requests.

    Attributes:
        keys: valid API keys; empty: requests need no key.
        hosts: valid host names of requests; empty: all.
        origins: origins of web pages that may send requests.
        timeout: maximum number of seconds of an answer; None: no limit.
        body: maximum number of bytes of a request's body.
    """

    keys: Sequence[str] = ()
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    timeout: float | None = None
    body: int = 1_000_000


class Api:
    """The endpoints of the HTTP API: for each path a method that answers a request.

    `draining` is set when the server shuts down. Requests for answers are then refused.

    Args:
        sampling: default values for the sampling fields of a request.
    """

    def __init__(self, scheduler: Scheduler, shelf: Shelf, sampling: Sampling, limits: Limits):
        self.scheduler, self.shelf, self.sampling, self.limits = scheduler, shelf, sampling, limits
        self.metrics = Metrics(scheduler.measures)
        self.draining = False

    def app(self) -> ASGIApp:
        """Return the ASGI app."""
        posted = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.complete,
            "/v1/indices": self.open_index,
        }
        read = {
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.model,
            "/health": self.health,
            "/metrics": self.measures,
            "/openapi.json": self.openapi,
        }
        routes = [Route(path, self._guarded(deed), methods=["POST"]) for path, deed in posted.items()]
        routes += [Route(path, self._guarded(deed), methods=["GET"]) for path, deed in read.items()]
        routes.append(Route("/v1/indices/{name}", self._guarded(self.close_index), methods=["DELETE"]))
        gate = Middleware(Gate, self.limits.keys, self.limits.hosts)
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(self.limits.origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
        layers = [cors, gate] if self.limits.origins else [gate]
        app = Starlette(routes=routes, middleware=layers, exception_handlers={HTTPException: _refused})
        app.router.redirect_slashes = False
        return Counted(app, self.metrics, {*posted, *read} - {"/v1/models/{model:path}"})

    async def chat(self, request: Request) -> Response:
        asked = parsed(ChatRequest, await read_body(request, self.limits.body))
        given = [messages.Message(SYSTEM_ROLES.get(one.role, one.role), one.text) for one in asked.messages]

        async def encode(index: OpenIndex) -> list[torch.Tensor]:
            if asked.reasoning_effort is not None and may_reason(index.tokenizer):
                told = "reasoning_effort none is not supported for this model, which may reason first; leave it out"
                raise ApiError(400, told, param="reasoning_effort", code="invalid_value")
            return [await self._encoded("messages", partial(messages.conversation_tokens, index, given))]

        return await self._answer(request, asked, ChatForm, encode)

    async def complete(self, request: Request) -> Response:
        asked = parsed(CompletionRequest, await read_body(request, self.limits.body))

        async def encode(index: OpenIndex) -> list[torch.Tensor]:
            return [await self._encoded("prompt", partial(question_ids, index, one, raw=True)) for one in asked.prompts]

        return await self._answer(request, asked, TextForm, encode)

    async def models(self, request: Request) -> Response:
        return _json(ModelList(data=listed(self.shelf)))

    async def model(self, request: Request) -> Response:
        name = str(request.path_params["model"])
        served, config = await find(self.shelf, name)
        return _json(described(replace(served, name=name, config=config)))

    async def open_index(self, request: Request) -> Response:
        asked = parsed(IndexRequest, await read_body(request, self.limits.body))
        self._check_comes_and_goes(asked.name)
        if (served := await self.shelf.find(asked.name)) is None:
            raise unknown(self.shelf, asked.name, "name")
        return _json(described(served))

    async def close_index(self, request: Request) -> Response:
        name = str(request.path_params["name"])
        self._check_comes_and_goes(name)
        self.shelf.close(name)
        return _json(IndexClosed(id=name))

    def _check_comes_and_goes(self, name: str) -> None:
        """Raise ApiError unless the folder of --indices-from has the index, so that clients may open and close it."""
        if self.shelf.folder is None:
            told = "this server's indices are fixed; start it with --indices-from FOLDER to open and close others"
            raise ApiError(403, told, code="not_allowed")
        if not self.shelf.is_offered(name):
            if name in self.shelf.names():
                told = f"{name} is named on the server's command line, so it stays open"
                raise ApiError(403, told, param="name", code="not_allowed")
            raise unknown(self.shelf, name, "name")

    async def health(self, request: Request) -> Response:
        return _json(Health(status="draining" if self.draining else "ok"), 503 if self.draining else 200)

    async def measures(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def openapi(self, request: Request) -> Response:
        return Response(
            json.dumps(requests.description(with_key=bool(self.limits.keys))), media_type="application/json"
        )

    def error(self, error: Exception) -> ApiError:
        """Return the API's error for any exception. An unexpected exception is printed to stderr and not sent."""
        if not isinstance(error, SparsekvError | ApiError):
            note(f"error: {describe(error, 'serve')}", quiet=False)
            return ApiError(500, "the answer failed; the server's stderr says why", "server_error", headers=NO_RETRY)
        told = failure(error) if isinstance(error, SparsekvError) else error
        return replace(told, message=self.shelf.without_folders(told.message))

    def _guarded(self, deed: Endpoint) -> Endpoint:
        """Return an endpoint that converts exceptions to error responses.

        The response for a client that has disconnected is empty. A cancellation is raised again, unless the server
        shuts down.
        """

        async def endpoint(request: Request) -> Response:
            try:
                return await deed(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)
            except asyncio.CancelledError:
                if not self.draining:
                    raise
                return shut_down().response()
            except Exception as error:
                return self.error(error).response()

        return endpoint

    def _about(self, asked: Asked, served: Served, config: DecodeConfig) -> About:
        with_logprobs = asked.alternatives is not None
        with_usage = asked.with_usage or config.gauge or bool(asked.sources)
        about = asked.model, config, served.opened.tokenizer, asked.choices, with_usage, with_logprobs
        return About(*about, with_sources=bool(asked.sources))

    async def _encoded(self, param: str, encode: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call `encode` in the executor's only thread, and return its token ids.

        A tokenizer must not encode in two threads at once. Raises ApiError (400) for text that cannot be encoded; the
        error names the field `param` of the request.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self.shelf.executor, encode)
        except SparsekvError as error:
            raise ApiError(400, str(error), param=param, code="invalid_value") from None

    async def _answer(
        self,
        request: Request,
        asked: Asked,
        form: type[ChatForm | TextForm],
        encode: Callable[[OpenIndex], Awaitable[list[torch.Tensor]]],
    ) -> Response:
        """Return the response to a request: a whole answer or a stream of events.

        Args:
            form: the response format of the endpoint.
            encode: returns the token ids of the request's prompts.
        """
        began = time.perf_counter()
        about, streams = await self._asked(asked, encode)
        answers = Answers(streams)
        try:
            # The response starts after the first piece, because a request may be refused until then.
            first = await while_connected(request, answers.first())
            self.metrics.first_token.observe(time.perf_counter() - began)
            told = Told(form(about), self, len(streams))
            if asked.stream:
                return EventStream(answers, told.events(first, answers))
            return _json(await while_connected(request, told.whole(first, answers)))
        except BaseException:
            await answers.close()
            raise

    async def _asked(
        self, asked: Asked, encode: Callable[[OpenIndex], Awaitable[list[torch.Tensor]]]
    ) -> tuple[About, list[Stream]]:
        """Submit a request to its index; return the facts for its response, and a stream for each answer.

        If the index is replaced or closed while the prompts are encoded, start over.
        """
        while True:
            served, config = await find(self.shelf, asked.model, asked.sparsekv)
            with self.shelf.using(served):
                encoded = await encode(served.opened)
                if self.shelf.holds(served):
                    return self._about(asked, served, config), self._submitted(asked, served, config, encoded)

    def _submitted(
        self, asked: Asked, served: Served, config: DecodeConfig, encoded: Sequence[torch.Tensor]
    ) -> list[Stream]:
        """Submit each prompt once per requested answer.

        Raises ApiError if the server shuts down or the queue is full, and the other errors of `Scheduler.submit_all`.
        """
        if self.draining:
            raise replace(shut_down(), message="the server shuts down; ask again later", headers={"Retry-After": "1"})
        samplings = [self._sampling(asked) for _ in encoded]
        each = [
            Submission(
                index=served.name,
                config=config,
                tokens=tokens,
                sampling=replace(sampling, seed=_moved(sampling.seed, number)),
                stop=asked.stops,
                logprobs=asked.alternatives,
                timeout=self.limits.timeout,
                sources=asked.sources,
            )
            for tokens, sampling in zip(encoded, samplings, strict=True)
            for number in range(asked.choices)
        ]
        try:
            return self.scheduler.submit_all(each)
        except QueueFullError as error:
            seconds = {"Retry-After": str(max(1, ceil(error.retry_after)))}
            raise ApiError(429, str(error), "rate_limit_error", code="queue_full", headers=seconds) from None

    def _sampling(self, asked: Asked) -> Sampling:
        """Return the sampling of one prompt of a request. Without a seed in the request, the seed is random.

        Raises ApiError (400) for a temperature that is too small, and for a `top_p` below 1 without a temperature if
        the server's default temperature is 0. By OpenAI's default of 1, such a request would get a sampled answer. A
        `top_p` beside a temperature of 0 is accepted, because clients send all their settings.
        """
        temperature = self.sampling.temperature if asked.temperature is None else asked.temperature
        top_p = self.sampling.top_p if asked.top_p is None else asked.top_p
        if asked.temperature is None and not temperature and asked.top_p not in (None, 1):
            told = (
                f"top_p {asked.top_p:g} has no effect at temperature 0, this server's default; give a temperature "
                "above 0 too"
            )
            raise ApiError(400, told, param="top_p", code="invalid_value")
        drawn = secrets.randbelow(2**63) if asked.seed is None else asked.seed
        try:
            return Sampling(
                max_new_tokens=asked.longest or self.sampling.max_new_tokens,
                temperature=temperature,
                top_p=top_p if temperature else None,
                seed=drawn,
            )
        except UsageError as error:
            raise ApiError(400, str(error), param="temperature", code="invalid_value") from None


class Told:
    """Writes the pieces of a request's answers in the response format `form`, and records metrics."""

    def __init__(self, form: Form, api: Api, choices: int):
        self.form, self.api, self.choices = form, api, choices
        self._usages: dict[int, Usage] = {}

    async def events(self, first: tuple[int, Piece], answers: Answers) -> AsyncIterator[str]:
        """Yield the server-sent events of a stream. An error is sent as the last event."""
        try:
            for choice in range(self.choices):
                for sent in self.form.opening(choice):
                    yield _event(sent.model_dump_json())
            for sent in self.form.event(*self._seen(*first)):
                yield _event(sent.model_dump_json())
            before = time.perf_counter()
            async for choice, piece in answers:
                now = time.perf_counter()
                self.api.metrics.gap.observe(now - before)
                before = now
                for sent in self.form.event(*self._seen(choice, piece)):
                    yield _event(sent.model_dump_json())
            for sent in self.form.closing(self._each):
                yield _event(sent.model_dump_json())
            yield _event(requests.DONE)
        except Exception as error:
            yield _event(self.api.error(error).json())

    async def whole(self, first: tuple[int, Piece], answers: Answers) -> Sent:
        """Return the body of an answer that is not streamed."""
        wholes = [Whole() for _ in range(self.choices)]
        wholes[first[0]].add(self._seen(*first)[1])
        async for choice, piece in answers:
            wholes[choice].add(self._seen(choice, piece)[1])
        return self.form.whole(wholes, self._each)

    def _seen(self, choice: int, piece: Piece) -> tuple[int, Piece]:
        if piece.usage is not None:
            self._usages[choice] = piece.usage
            if (gauge := gauge_of([piece.usage])) is not None:
                self.api.metrics.missed.observe(gauge.missed)
        return choice, piece

    @property
    def _each(self) -> list[Usage]:
        return [self._usages[choice] for choice in sorted(self._usages)]


class EventStream(StreamingResponse):
    """A stream of server-sent events. If the client disconnects, the answers are cancelled."""

    def __init__(self, answers: Answers, events: AsyncIterator[str]):
        # Without these headers, proxies such as nginx would buffer events.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self.answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.answers.close()


class Counted:
    """An ASGI app that wraps another app, and counts requests by path and by status of the response.

    A request whose response was not completed is counted with the status CLIENT_GONE.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str]):
        self.app, self.metrics, self.paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, ended = CLIENT_GONE, False

        async def seen(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                ended = True
                self._count(scope["path"], status)
            await send(message)

        try:
            await self.app(scope, receive, seen)
        finally:
            if not ended:
                self._count(scope["path"], CLIENT_GONE)

    def _count(self, path: str, status: int) -> None:
        self.metrics.requests.labels(self._label(path), str(status)).inc()

    def _label(self, path: str) -> str:
        if path.startswith("/v1/models/"):
            return "/v1/models/{model}"
        if path.startswith("/v1/indices/"):
            return "/v1/indices/{name}"
        return path if path in self.paths else "other"


def _moved(seed: int, number: int) -> int:
    """Return the seed of answer `number` to a prompt: `seed + number`, wrapped to the range of int64."""
    return (seed + number + 2**63) % 2**64 - 2**63


async def _refused(request: Request, error: Exception) -> Response:
    """Return the error response for an unknown path, or for a method that the path does not support."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = getattr(error, "headers", None) or {}
    told = f"{request.method} {request.url.path}: there is no such path; /openapi.json lists those that there are"
    if status == 405:
        allowed = ", ".join(sorted(headers.get("Allow", "").split(", ")))
        told = f"{request.url.path} does not take {request.method}; it takes {allowed}"
    return ApiError(status, told, code="unknown_url", headers=headers).response()


def _json(sent: Sent, status: int = 200) -> Response:
    return Response(sent.model_dump_json(), status, media_type="application/json")


def _event(data: str) -> str:
    return f"data: {data}\n\n"
