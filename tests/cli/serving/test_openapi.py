"""The description at /openapi.json is true: it allows what is sent and accepted, and forbids what is refused."""

import json
from typing import Any

import jsonschema
import pytest
from support.serving import Server, events, user

from .test_refusals import CHANGES, CHAT, HARMLESS, TEXT, VALID

TOLD = {"logprobs": True, "top_logprobs": 2, "n": 2, "temperature": 1.0, "stop": "x", "seed": 1}
BEYOND = (
    "give one",
    "stream: true",
    "no effect at temperature",
    "0 (greedy)",
    "logprobs: true",
    "must be the",
    "empty",
    "system",
    "budget",
    "quest",
    "no effect",
    "prefill",
)
"""Parts of refusals that say more than a schema can."""


@pytest.fixture(scope="module")
def description(server: Server) -> dict[str, Any]:
    with server.http() as http:
        found: dict[str, Any] = http.get("/openapi.json").json()
    return found


def check(description: dict[str, Any], schema: dict[str, Any], instance: Any) -> None:
    """Raise `jsonschema.ValidationError` if a schema of the description forbids something."""
    jsonschema.Draft202012Validator(schema | {"components": description["components"]}).validate(instance)


def test_answers_are_those_of_the_description(server: Server, description: dict[str, Any]) -> None:
    text = {"model": "doc", "prompt": "Line", "max_tokens": 3, "logprobs": 1}
    with server.http() as http:
        for path, body in ((CHAT, VALID), (CHAT, VALID | TOLD), (TEXT, text)):
            contents = description["paths"][path]["post"]["responses"]["200"]["content"]
            check(description, contents["application/json"]["schema"], http.post(path, json=body).json())
            streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
            with http.stream("POST", path, json=streamed) as answer:
                schema = contents["text/event-stream"]["schema"]
                for event in events(answer.iter_lines()):
                    check(description, schema, {"data": json.dumps(event)})
                    check(description, schema["properties"]["data"]["anyOf"][0]["contentSchema"], event)
                check(description, schema, {"data": "[DONE]"})
        for path in ("/v1/models", "/health"):
            content = description["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
            check(description, content["schema"], http.get(path).json())
        refused = http.post(CHAT, json={})
    error = description["paths"][CHAT]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
    check(description, error, refused.json())


def test_requests_are_those_of_the_description(description: dict[str, Any]) -> None:
    schema = description["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for body in (VALID, VALID | HARMLESS, VALID | TOLD, VALID | {"messages": [user("a"), user("b")]}):
        check(description, schema, body)
    for change, param, told in CHANGES:
        if told and param != "model" and not any(word in told for word in BEYOND):
            with pytest.raises(jsonschema.ValidationError):
                check(description, schema, VALID | change)


def test_the_description_lists_every_path_and_says_what_needs_a_key(
    server: Server, description: dict[str, Any]
) -> None:
    assert description["openapi"] == "3.1.0"
    assert "security" not in description
    with server.http() as http:
        for path, deeds in description["paths"].items():
            called = path.replace("{model}", "doc").replace("{name}", "doc")
            for method in deeds.keys() & {"get", "post", "delete"}:
                assert http.request(method.upper(), called).status_code not in (404, 405)
    json.dumps(description)


def test_the_description_lists_the_errors_of_each_path(server: Server, description: dict[str, Any]) -> None:
    foreign = {"Host": "evil.example"}
    with server.http() as http:
        sent = {
            ("/v1/models/{model}", "400"): http.get("/v1/models/doc@none"),
            ("/v1/models/{model}", "404"): http.get("/v1/models/none"),
            ("/health", "421"): http.get("/health", headers=foreign),
            ("/metrics", "421"): http.get("/metrics", headers=foreign),
        }
    for (path, status), answer in sent.items():
        assert str(answer.status_code) == status
        response = description["paths"][path]["get"]["responses"][status]
        check(description, response["content"]["application/json"]["schema"], answer.json())
    for deeds in description["paths"].values():
        for operation in (deeds[one] for one in ("get", "delete") if one in deeds):
            assert not any("body" in response["description"] for response in operation["responses"].values())


def test_the_description_tells_a_busy_server_from_one_that_shuts_down(description: dict[str, Any]) -> None:
    asked = description["paths"][CHAT]["post"]["responses"]["503"]["description"]
    health = description["paths"]["/health"]["get"]["responses"]["503"]["description"]
    assert "shutdown" in asked
    assert "busy" in asked
    assert health == "The server shuts down."
