"""Requests that are refused: each in the API's form, with the field and what to do, and the server goes on."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from support.command import run_here
from support.serving import Server, serving, user

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEYS = ("first-key", "second-key")
VALID: dict[str, Any] = {"model": "doc", "messages": [user("What is it?")], "max_tokens": 2}


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx2.Client]:
    with server.http() as client:
        yield client


def refusal(answer: httpx2.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


CHANGES: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format.type", "not supported"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
    ({"logit_bias": {"50": 1}}, "logit_bias", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    ({"top_k": 5}, "top_k", "is not a field of this request"),
    ({"sparsekv": {"methods": "quest"}}, "sparsekv.methods", "is not a field of this request"),
    ({"sparsekv": {"method": ""}}, "sparsekv.method", ": give at least 1 character"),
    ({"sparsekv": {"method": "quest", "budget": ""}}, "sparsekv.budget", ": give at least 1 character"),
    ({"max_tokens": 0}, "max_tokens", ": give at least 1"),
    ({"max_tokens": "2"}, "max_tokens", ": give a whole number"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "give one"),
    ({"temperature": 3}, "temperature", ": give at most 2"),
    ({"top_p": 0}, "top_p", ": give more than 0"),
    ({"top_p": 0.5}, "top_p", "no effect at temperature 0, this server's default; give a temperature above 0 too"),
    ({"temperature": 1e-9}, "temperature", "give 0 (greedy), or at least"),
    ({"n": 17}, "n", ": give at most 16"),
    ({"seed": 2**63}, "seed", ": give less than"),
    ({"stop": ""}, "stop", ": give at least 1 character"),
    ({"stop": ["a", 5]}, "stop.1", ": give a string"),
    ({"stop": 5}, "stop", ": give a string or an array"),
    ({"stream": "yes"}, "stream", ": give true or false"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", ": give false"),
    ({"metadata": {"a": 5}}, "metadata.a", ": give a string"),
    ({"stop": list("abcde")}, "stop", ": give at most 4 items"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ": give at most 20"),
    ({"messages": []}, "messages", ": give at least 1 item"),
    ({"messages": [{"role": "tool", "content": "5"}]}, "messages.0.role", ": give 'system', 'developer', 'user'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
    ({"messages": [user([{"type": "image_url"}])]}, "messages.0.content.0.type", ": give 'text'"),  # type: ignore[arg-type]
    ({"messages": [user(" ")]}, "messages", "empty"),
    ({"messages": [{"role": "assistant", "content": "It is 9."}]}, "messages", "first must be the user's"),
    ({"messages": [user("a"), user("b")]}, "messages", ""),
    ({"messages": [{"role": "system", "content": "Be brief."}, user("a")]}, "messages", "system"),
    ({"sparsekv": {"budget": 0}}, "sparsekv", "budget 0 is not a budget"),
    ({"sparsekv": {"budget": "300%"}}, "sparsekv", "not a budget"),
    ({"sparsekv": {"method": "qest"}}, "sparsekv", "did you mean quest?"),
    ({"sparsekv": {"method": "dense", "budget": 0.1}}, "sparsekv", "no effect"),
    ({"sparsekv": {"method": "window", "budget": 0.1}}, "sparsekv", "budget 0.1 has no effect on window"),
    ({"sparsekv": {"prefill": "nothing"}}, "sparsekv", "prefill nothing"),
    ({"sparsekv": {"method": "quest", "gauge": True}}, "sparsekv", "quest cannot estimate"),
    ({"sparsekv": {"method": "dense", "gauge": True}}, "sparsekv", "no effect"),
    ({"sparsekv": {"sources": 0}}, "sparsekv.sources", ": give at least 1"),
    ({"sparsekv": {"passages": 3}}, "sparsekv.passages", "is not a field of this request"),
    ({"model": "doc:codes"}, "model", "build-index doc.skv --method codes"),
    ({"model": 5}, "model", ": give a string"),
]


@pytest.mark.parametrize(("change", "param", "told"), CHANGES, ids=lambda one: str(one)[:40])
def test_a_wrong_field_is_named(http: httpx2.Client, change: dict[str, Any], param: str, told: str) -> None:
    error = refusal(http.post(CHAT, json=VALID | change), 400)
    assert error["param"] == param
    assert told in error["message"]
    assert error["type"] == "invalid_request_error"


HARMLESS: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "stop": None,
    "store": False,
    "top_p": 1,
    "temperature": 0,
    "stream": False,
    "logprobs": False,
    "top_logprobs": 0,
    "parallel_tool_calls": True,
}


def test_fields_that_change_nothing_are_accepted(http: httpx2.Client) -> None:
    plain = http.post(CHAT, json=VALID).json()["choices"]
    assert http.post(CHAT, json=VALID | HARMLESS).json()["choices"] == plain
    assert http.post(CHAT, json=VALID | {"temperature": 0, "top_p": 0.5}).json()["choices"] == plain


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "not JSON at line 1"),
        (b"{", "not JSON"),
        (b"[1]", "the body is not an object; send a JSON object"),
        (b"\xff{}", "not JSON"),
        (b"[" * 9999, "not JSON"),
    ],
)
def test_a_body_that_is_no_request_is_refused(http: httpx2.Client, body: bytes, told: str) -> None:
    assert told in refusal(http.post(TEXT, content=body, headers={"Content-Type": "application/json"}), 400)["message"]


def test_an_empty_prompt_is_refused(http: httpx2.Client) -> None:
    for prompt in ("", " \n", ["a", ""]):
        error = refusal(http.post(TEXT, json={"model": "raw", "prompt": prompt}), 400)
        assert (error["param"], error["message"]) == ("prompt", "the prompt is empty; write something")


def test_an_index_may_be_named_with_its_ending(http: httpx2.Client) -> None:
    assert http.post(CHAT, json=VALID | {"model": "doc.skv"}).status_code == 200
    assert "no model 'dok.skv'" in refusal(http.post(CHAT, json=VALID | {"model": "dok.skv"}), 404)["message"]


def test_other_refusals_say_why(http: httpx2.Client) -> None:
    json = {"Content-Type": "application/json"}
    assert "there are: doc, raw" in refusal(http.post(CHAT, json=VALID | {"model": "manual"}), 404)["message"]
    assert refusal(http.get("/v1/models/none"), 404)["code"] == "model_not_found"
    assert "no such path" in refusal(http.get("/etc/passwd"), 404)["message"]
    assert "takes GET" in refusal(http.delete("/health"), 405)["message"]
    large = refusal(http.post(CHAT, content=b" " * 2_000_000, headers=json), 413)
    assert "larger than 1,000,000 bytes" in large["message"]
    plain = {"Content-Type": "text/plain"}  # a web page of another site may send it without asking
    assert refusal(http.post(CHAT, content=b"{}", headers=plain), 415)["param"] is None
    assert "Host header" in refusal(http.get("/v1/models", headers={"Host": "evil.example"}), 421)["message"]
    long = refusal(http.post(CHAT, json=VALID | {"messages": [user("word " * 1000)]}), 400)
    assert "positions" in long["message"]


def test_pages_of_other_origins_may_not_ask(http: httpx2.Client) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in http.options(CHAT, headers=asked).headers
    assert "access-control-allow-origin" not in http.get("/v1/models", headers=asked).headers


@pytest.fixture(scope="module")
def guarded(indices: Path) -> Iterator[Server]:
    """A server with keys, that web pages of one origin may ask, and with room for one request and one that waits."""
    (indices / "keys").write_text("\n".join(("", *KEYS, "")))
    options = ("--api-key-file", "keys", "--cors", "https://chat.example", "--slots", "1", "--max-queue", "1")
    with serving(indices, "doc.skv", "--model", "model", *options) as one:
        yield one


def test_a_key_is_asked_for(guarded: Server) -> None:
    with guarded.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEYS[0]}"}):
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
                answer = http.get(path, headers=headers)
                assert refusal(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            refusal(http.post(CHAT, json=VALID, headers=headers), 401)
    for key in KEYS:
        assert [one.id for one in guarded.openai(key).models.list()] == ["doc"]
    with pytest.raises(openai.AuthenticationError):
        guarded.openai("wrong").models.list()


def test_reasoning_is_not_left_out_of_a_model_that_may_reason(indices: Path, tmp_path: Path) -> None:
    shutil.copytree(indices / "model", tmp_path / "model")
    with (tmp_path / "model" / "chat_template.jinja").open("a") as template:
        template.write("{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}")
    (tmp_path / "doc.txt").write_text("Line 1 says that 1 times 1 is 1.\n" * 20)
    built = ("--model", tmp_path / "model", "--method", "squeezed", "-o", tmp_path / "doc.skv", "-q")
    assert run_here("build-index", tmp_path / "doc.txt", *built).code == 0
    with serving(tmp_path, "doc.skv", "--model", "model") as one, one.http() as http:
        assert refusal(http.post(CHAT, json=VALID | {"reasoning_effort": "none"}), 400)["param"] == "reasoning_effort"
        assert http.post(CHAT, json=VALID).status_code == 200


def test_a_named_origin_may_ask(guarded: Server) -> None:
    asked = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    with guarded.http() as http:
        permitted = http.options(CHAT, headers=asked | {"Access-Control-Request-Headers": "authorization"})
        refused = http.get("/v1/models", headers=asked)
    assert permitted.status_code == 200
    assert permitted.headers["access-control-allow-origin"] == "https://chat.example"
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"


def test_a_full_queue_tells_when_to_ask_again(guarded: Server) -> None:
    asked = VALID | {"max_tokens": 1000, "stream": True, "n": 16}
    with guarded.http(Authorization=f"Bearer {KEYS[0]}") as http:
        with http.stream("POST", CHAT, json=asked) as running:
            lines = running.iter_lines()  # named, because an iterator that is freed ends the request
            next(lines)
            answer = http.post(CHAT, json=VALID)  # one of the 16 answers runs, and the others wait
            assert refusal(answer, 429)["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
        while (answer := http.post(CHAT, json=VALID)).status_code == 429:
            pass
        assert answer.status_code == 200


def test_a_request_of_more_answers_than_may_wait_is_answered(guarded: Server) -> None:
    asked = VALID | {"model": "doc@77%", "n": 4}  # no earlier request had this budget
    with guarded.http(Authorization=f"Bearer {KEYS[0]}") as http:
        while (answer := http.post(CHAT, json=VALID)).status_code == 429:  # an earlier test's answer still runs
            pass
        answer = http.post(CHAT, json=asked)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 4
