"""Bodies of requests, and the OpenAPI description of the server, made from the pydantic models of both directions.

Bodies have the supported fields of OpenAI's API, and unsupported fields that may only have the value without effect.
"""

import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.json_schema import models_json_schema

from sparsekv.cli.serving.errors import UNSUPPORTED, ApiError, ErrorAnswer, invalid
from sparsekv.cli.serving.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Health,
    IndexClosed,
    ModelList,
    ModelSent,
)
from sparsekv.runtime.attention.config import MOST_SOURCES

MOST_CHOICES = 16
MOST_STOPS = 4

Number = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Nothing = Annotated[list[Any], Field(max_length=0)]
Ignored = Annotated[str | None, Field(description="Accepted, and without effect.")]


class Body(BaseModel):
    """Base class of request bodies. Undeclared fields are refused, and values are not converted to other types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Extension(Body):
    """Options of the attention to the document, in the field `sparsekv` of a request."""

    method: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    budget: Annotated[str, Field(min_length=1, max_length=32)] | int | float | None = None
    prefill: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    gauge: bool | None = None
    sources: Annotated[int, Field(ge=1, le=MOST_SOURCES)] | None = None


class TextPart(Body):
    """A part of a message. Only text parts are supported."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a conversation. The message of an answer may be sent back unchanged."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing | None = None
    annotations: Nothing | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(Body):
    """`stream_options` of OpenAI's API.

    Only `include_usage` has an effect. `include_obfuscation` may only be false.
    """

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(Body):
    """The only format of an answer: text."""

    type: Literal["text"]


class Asked(Body):
    """Fields that requests for chat completions and for text completions have in common."""

    model: Annotated[str, Field(max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[Number, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Number | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MOST_STOPS)]
        | None
    ) = None
    sparsekv: Extension | None = None

    user: Ignored = None

    frequency_penalty: Annotated[Annotated[float, Field(ge=0, le=0)] | None, UNSUPPORTED] = None
    presence_penalty: Annotated[Annotated[float, Field(ge=0, le=0)] | None, UNSUPPORTED] = None
    logit_bias: Annotated[Annotated[dict[str, Any], Field(max_length=0)] | None, UNSUPPORTED] = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def longest(self) -> int | None:
        """Maximum number of tokens of an answer; None for the server's default."""
        return self.max_tokens

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def sources(self) -> int:
        """Maximum number of an answer's sources."""
        return 0 if self.sparsekv is None else self.sparsekv.sources or 0

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives to return for each token; None if no log-probabilities are returned."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ApiError for fields that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options", code="invalid_value")


class ChatRequest(Asked):
    """The body of a request for a chat completion."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[Number, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    metadata: Annotated[dict[str, str] | None, Field(description="Accepted, and without effect.")] = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    audio: Annotated[None, UNSUPPORTED] = None
    function_call: Annotated[Literal["none"] | None, UNSUPPORTED] = None
    functions: Annotated[Nothing | None, UNSUPPORTED] = None
    modalities: Annotated[list[Literal["text"]] | None, UNSUPPORTED] = None
    moderation: Annotated[None, UNSUPPORTED] = None
    parallel_tool_calls: Annotated[bool | None, Field(description="Accepted: there are no tools.")] = None
    prediction: Annotated[None, UNSUPPORTED] = None
    reasoning_effort: Annotated[Literal["none"] | None, UNSUPPORTED] = None
    response_format: Annotated[TextFormat | None, UNSUPPORTED] = None
    service_tier: Annotated[Literal["auto", "default"] | None, UNSUPPORTED] = None
    store: Annotated[Literal[False] | None, UNSUPPORTED] = None
    tool_choice: Annotated[Literal["none", "auto"] | None, UNSUPPORTED] = None
    tools: Annotated[Nothing | None, UNSUPPORTED] = None
    verbosity: Annotated[Literal["medium"] | None, UNSUPPORTED] = None
    web_search_options: Annotated[None, UNSUPPORTED] = None

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            told = "max_tokens and max_completion_tokens are the old and the new name of one field; give one of them"
            raise ApiError(400, told, param="max_tokens", code="invalid_value")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")


class CompletionRequest(Asked):
    """The body of a request to continue a text that follows the document, without the chat template."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    best_of: Annotated[Annotated[int, Field(ge=1, le=1)] | None, UNSUPPORTED] = None
    echo: Annotated[Literal[False] | None, UNSUPPORTED] = None
    suffix: Annotated[None, UNSUPPORTED] = None

    @property
    def prompts(self) -> Sequence[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if not all(one.strip() for one in self.prompts):
            raise ApiError(400, "the prompt is empty; write something", param="prompt", code="invalid_value")
        if len(self.prompts) * self.choices > MOST_CHOICES:
            told = (
                f"{len(self.prompts)} prompts of {self.choices} answers each are more than {MOST_CHOICES}; ask "
                "for fewer"
            )
            raise ApiError(400, told, param="prompt", code="invalid_value")


class IndexRequest(Body):
    """The body of a request to open an index in the server's folder of indices. `name` has no `.skv`."""

    name: Annotated[str, Field(min_length=1, max_length=255, json_schema_extra={"pattern": "^[^/]+$"})]

    def check(self) -> None:
        """Raise ApiError for a name that is a path."""
        if "/" in self.name or self.name in (".", ".."):
            told = f"{self.name!r} is a path; give the name of an index in the server's folder, without .skv"
            raise ApiError(400, told, param="name", code="invalid_value")


Request = TypeVar("Request", ChatRequest, CompletionRequest, IndexRequest)


def parsed(kind: type[Request], body: bytes) -> Request:
    """Parse a body. Raises ApiError (400) if the body is not JSON or not a request of this kind, or if its fields
    contradict each other."""
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(kind, error, body) from None
    asked.check()
    return asked


def _refusal(kind: type[BaseModel], error: ValidationError, body: bytes) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        place = re.search(r"line (\d+) column (\d+)$", first["ctx"]["error"])
        where = f" at line {place[1]}, column {place[2]}" if place else ""
        return ApiError(400, f"the body is not JSON{where}; send a JSON object", code="invalid_json")
    return invalid(kind, error, json.loads(body))


REFERENCE = "#/components/schemas/{model}"
_MODELS: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    IndexRequest,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ModelList,
    ModelSent,
    IndexClosed,
    Health,
    ErrorAnswer,
)
DONE = "[DONE]"
"""Data of the last event of a stream."""
_GATE = {
    "401": "The server requires a key, and the request has no valid key.",
    "421": "The Host header names another machine.",
}
_BODY = {
    "400": "The body is not JSON or not a request of this kind; error.param names the field.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not sent as application/json.",
}
_NO_MODEL = {"404": "There is no such model."}
_ANSWER = {
    "429": "The queue is full; Retry-After tells when to ask again.",
    "500": "The answer failed.",
    "503": "The server shuts down (error.code is shutdown), or no slot was free in time (error.code is busy).",
    "504": "The answer took longer than the server allows.",
}
_NAME = {"400": "The model's name has a method or a budget that cannot be used."}
_FIXED = {"403": "The server does not let clients open and close this index."}
_FOLDER = {"500": "The server's folder of indices cannot be read."}
_OPENING = {
    "500": "The index cannot be opened, or the server's folder of indices cannot be read.",
    "503": "The server shut down before the index was opened.",
}


def description(*, with_key: bool) -> dict[str, Any]:
    """Return the OpenAPI description.

    Args:
        with_key: whether requests need a key.
    """
    _, schemas = models_json_schema([(model, "validation") for model in _MODELS], ref_template=REFERENCE)
    paths = {
        "/v1/chat/completions": _asked(ChatRequest, ChatCompletion, ChatCompletionChunk, "Answer a conversation."),
        "/v1/completions": _asked(CompletionRequest, Completion, Completion, "Continue the text after a document."),
        "/v1/models": _read("List the served indices.", _json(ModelList), _GATE | _FOLDER),
        "/v1/models/{model}": _read("Describe a served index.", _json(ModelSent), _GATE | _NAME | _NO_MODEL | _OPENING),
        "/v1/indices": _posted(
            IndexRequest,
            _json(ModelSent),
            "Open an index of the server's folder.",
            _GATE | _BODY | _FIXED | _NO_MODEL | _OPENING,
        ),
        "/v1/indices/{name}": {
            "delete": _answered("Close an index.", _json(IndexClosed), _GATE | _FIXED | _NO_MODEL | _FOLDER)
        },
        "/health": _read("Tell whether requests are answered.", _json(Health), {"421": _GATE["421"]}),
        "/metrics": _read("Measures for Prometheus.", {"text/plain": {"schema": {"type": "string"}}}, _GATE),
    }
    paths["/v1/models/{model}"]["parameters"] = _in_path("model")
    paths["/v1/indices/{name}"]["parameters"] = _in_path("name")
    paths["/health"]["get"]["responses"]["503"] = {"description": "The server shuts down.", "content": _json(Health)}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "sparsekv serve", "version": version("sparsekv")},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }
    if with_key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
        paths["/health"]["get"]["security"] = []
    return found


def _asked(body: type[BaseModel], answer: type[BaseModel], event: type[BaseModel], told: str) -> dict[str, Any]:
    """Return the OpenAPI description of an endpoint that answers questions, whole or as a stream of events."""
    either = {"anyOf": [_reference(event), _reference(ErrorAnswer)]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": either}
    events = {
        "type": "object",
        "description": f"With `stream`: events whose data are of this kind or an error, and at the end `{DONE}`.",
        "properties": {"data": {"anyOf": [data, {"const": DONE}]}},
        "required": ["data"],
    }
    content = _json(answer) | {"text/event-stream": {"schema": events}}
    return _posted(body, content, told, _GATE | _BODY | _NO_MODEL | _ANSWER)


def _posted(body: type[BaseModel], content: dict[str, Any], told: str, errors: dict[str, str]) -> dict[str, Any]:
    """Return the OpenAPI description of a path with a POST request. `errors` describes errors by status."""
    asked = {"required": True, "content": _json(body)}
    return {"post": {"requestBody": asked, **_answered(told, content, errors)}}


def _read(told: str, content: dict[str, Any], errors: dict[str, str]) -> dict[str, Any]:
    """Return the OpenAPI description of a path with a GET request. `errors` describes errors by status."""
    return {"get": _answered(told, content, errors)}


def _answered(told: str, content: dict[str, Any], errors: dict[str, str]) -> dict[str, Any]:
    answer = {"200": {"description": told, "content": content}}
    refused = {status: {"description": errors[status], "content": _json(ErrorAnswer)} for status in sorted(errors)}
    return {"summary": told, "responses": answer | refused}


def _in_path(name: str) -> list[dict[str, Any]]:
    """Return the OpenAPI description of the parameter `name` in a path."""
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": _reference(model)}}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=model.__name__)}
