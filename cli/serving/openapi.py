"""The OpenAPI description of the server, made from the pydantic models of requests and responses."""

from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from sparsekv.cli.serving.errors import ErrorAnswer
from sparsekv.cli.serving.requests import ChatRequest, CompletionRequest, IndexRequest
from sparsekv.cli.serving.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Health,
    IndexClosed,
    ModelList,
    ModelSent,
)

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
    """Describe a path of completions."""
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
    """Describe a path with a POST request. `errors` has the descriptions of errors by status."""
    asked = {"required": True, "content": _json(body)}
    return {"post": {"requestBody": asked, **_answered(told, content, errors)}}


def _read(told: str, content: dict[str, Any], errors: dict[str, str]) -> dict[str, Any]:
    """Describe a path with a GET request. `errors` has the descriptions of errors by status."""
    return {"get": _answered(told, content, errors)}


def _answered(told: str, content: dict[str, Any], errors: dict[str, str]) -> dict[str, Any]:
    answer = {"200": {"description": told, "content": content}}
    refused = {status: {"description": errors[status], "content": _json(ErrorAnswer)} for status in sorted(errors)}
    return {"summary": told, "responses": answer | refused}


def _in_path(name: str) -> list[dict[str, Any]]:
    """Describe the parameter `name` in a path."""
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": _reference(model)}}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=model.__name__)}
