"""Answers as OpenAI's own client gets them, beside those of `generate`."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from support.chats import FRAME, tokens
from support.command import run_here
from support.serving import Server, events, user

from sparsekv.formats.index.reader import Artifact

QUESTION = "What is 3 times 3?"
LONG = 24


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return server.openai()


def generated(indices: Path, *options: str, index: str = "doc.skv", budget: str = "100%") -> dict[str, Any]:
    """The answer of `generate` to the question, by default with everything attended to."""
    longest = ("--max-new-tokens", str(LONG), "--budget", budget, "--json", "-q")
    outcome = run_here("generate", "-i", indices / index, "--model", indices / "model", QUESTION, *longest, *options)
    assert outcome.code == 0, outcome.stderr
    answer: dict[str, Any] = json.loads(outcome.stdout)
    return answer


@pytest.fixture(scope="module")
def expected(indices: Path) -> dict[str, Any]:
    return generated(indices)


def test_an_answer_is_that_of_generate(client: OpenAI, expected: dict[str, Any]) -> None:
    asked = {"model": "doc@100%", "messages": [user(QUESTION)], "max_tokens": LONG}
    answer = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == expected["text"]
    assert answer.choices[0].finish_reason == expected["finish_reason"]
    assert answer.usage.prompt_tokens == expected["prompt_tokens"]
    assert answer.usage.completion_tokens == expected["generated_tokens"]
    assert answer.usage.total_tokens == expected["prompt_tokens"] + expected["generated_tokens"]
    assert answer.sparsekv["kv_fraction"] == pytest.approx(expected["kv_fraction"])


def test_a_stream_tells_the_same_text(client: OpenAI, expected: dict[str, Any], indices: Path) -> None:
    stream = client.chat.completions.create(
        model="doc@100%",
        messages=[user(QUESTION)],  # type: ignore[list-item]
        max_completion_tokens=LONG,
        stream=True,
        stream_options={"include_usage": True},
    )
    first, *middle, last = list(stream)
    assert first.choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in middle) == expected["text"]
    assert [one.choices[0].finish_reason for one in middle if one.choices[0].finish_reason] == ["length"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == expected["generated_tokens"]
    assert last.usage.prompt_tokens_details is not None
    document = Artifact(indices / "doc.skv").manifest.split.tokens
    cached = last.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert document <= cached < last.usage.prompt_tokens
    assert len({one.id for one in (first, *middle, last)}) == 1


def test_a_plain_parser_reads_the_stream(server: Server, expected: dict[str, Any]) -> None:
    body = {"model": "doc@100%", "messages": [user(QUESTION)], "max_tokens": LONG, "stream": True}
    with server.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = events(answer.iter_lines())
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in found) == expected["text"]
    assert all("usage" not in one for one in found)


def test_several_answers_are_told_apart(client: OpenAI) -> None:
    asked = {"model": "doc", "messages": [user(QUESTION)], "max_tokens": 12, "temperature": 1.0, "seed": 5, "n": 3}
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    texts = [one.message.content for one in whole.choices]
    assert [one.index for one in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    alone = client.chat.completions.create(**asked | {"n": 1})  # type: ignore[call-overload]
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
    assert whole.usage.completion_tokens > alone.usage.completion_tokens
    streamed = ["", "", ""]
    for event in client.chat.completions.create(**asked, stream=True):  # type: ignore[call-overload]
        for choice in event.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert all(streamed)


def test_a_seed_draws_the_same_tokens_again(client: OpenAI) -> None:
    def drawn(**more: int) -> str:
        asked = {"model": "doc@100%", "messages": [user(QUESTION)], "max_tokens": 12, "temperature": 1.0}
        answer = client.chat.completions.create(**asked, **more)  # type: ignore[call-overload]
        return str(answer.choices[0].message.content)

    assert drawn(seed=3) == drawn(seed=3)
    assert drawn(seed=3) != drawn(seed=4)
    assert drawn() != drawn()


def test_equal_prompts_without_a_seed_are_drawn_apart(client: OpenAI) -> None:
    asked = {"model": "doc@100%", "prompt": ["Line 2", "Line 2"], "max_tokens": 12, "temperature": 1.0}
    first, second = (one.text for one in client.completions.create(**asked).choices)  # type: ignore[call-overload]
    assert first != second
    first, second = (one.text for one in client.completions.create(**asked, seed=3).choices)  # type: ignore[call-overload]
    assert first == second


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities_are_of_the_answers_tokens(client: OpenAI, expected: dict[str, Any], stream: bool) -> None:
    asked = {"model": "doc@100%", "messages": [user(QUESTION)], "max_tokens": LONG}
    told = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=stream)  # type: ignore[call-overload]
    if stream:
        each = [one.choices[0] for one in told]
        found = [token for choice in each if choice.logprobs for token in choice.logprobs.content or ()]
    else:
        found = told.choices[0].logprobs.content
    assert len(found) == expected["generated_tokens"]
    for token in found:
        likeliest = [one.logprob for one in token.top_logprobs]
        assert len(likeliest) == 3
        assert likeliest == sorted(likeliest, reverse=True)
        assert token.logprob == likeliest[0] <= 0
        assert token.token == token.top_logprobs[0].token
        assert token.bytes is None or bytes(token.bytes).decode() == token.token


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop_string(client: OpenAI, expected: dict[str, Any], stream: bool) -> None:
    text = expected["text"]
    stop = text[5:7]
    asked = {"model": "doc@100%", "messages": [user(QUESTION)], "max_tokens": LONG, "stop": ["never said", stop]}
    told = client.chat.completions.create(**asked, stream=stream)  # type: ignore[call-overload]
    if stream:
        each = [one.choices[0] for one in told]
        said, finish = "".join(one.delta.content or "" for one in each), each[-1].finish_reason
    else:
        said, finish = told.choices[0].message.content, told.choices[0].finish_reason
    assert (said, finish) == (text[: text.index(stop)], "stop")


def test_several_turns_are_framed_as_a_chat(client: OpenAI, indices: Path) -> None:
    first, answer, second = QUESTION, "It is 9.", "And 4 times 4?"
    messages = [user(first), {"role": "assistant", "content": answer}, user(second)]
    asked = {"model": "doc", "messages": messages, "max_tokens": 2}
    told = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    alone = client.chat.completions.create(**asked | {"messages": messages[:1]})  # type: ignore[call-overload]
    assert told.usage.prompt_tokens - alone.usage.prompt_tokens == tokens(FRAME, answer + second)


def test_a_completion_continues_the_text(server: Server, client: OpenAI, indices: Path) -> None:
    told = client.completions.create(model="raw@100%", prompt=QUESTION, max_tokens=LONG, logprobs=2)
    expected = generated(indices, "--raw", index="raw.skv")
    assert told.choices[0].text == expected["text"]
    logprobs = told.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or ()) == expected["generated_tokens"]
    # The client's types have no null as finish_reason, which events have until the last one, as OpenAI's own.
    lenient = server.openai(strict=False)
    stream = lenient.completions.create(model="raw@100%", prompt=QUESTION, max_tokens=LONG, stream=True)
    assert "".join(one.choices[0].text for one in stream) == expected["text"]


def test_several_prompts_get_answers_in_their_order(client: OpenAI) -> None:
    both = client.completions.create(model="raw@100%", prompt=["Line 3", "Say"], max_tokens=4, n=2)
    each = [client.completions.create(model="raw@100%", prompt=one, max_tokens=4) for one in ("Line 3", "Say")]
    assert [one.text for one in both.choices] == [one.choices[0].text for one in each for _ in range(2)]
    assert both.usage is not None
    assert both.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in each if one.usage)


def test_an_index_without_a_template_takes_messages_too(client: OpenAI, indices: Path) -> None:
    told = client.chat.completions.create(
        model="raw@100%",
        messages=[user(QUESTION)],  # type: ignore[list-item]
        max_tokens=LONG,
    )
    assert told.choices[0].message.content == generated(indices, index="raw.skv")["text"]


def test_indices_are_models(client: OpenAI, indices: Path) -> None:
    found = {one.id: one for one in client.models.list()}
    assert found.keys() == {"doc", "raw"}
    details = found["doc"].sparsekv  # type: ignore[attr-defined]
    assert details["tokens"] == Artifact(indices / "doc.skv").manifest.split.tokens
    assert (details["method"], details["budget"]) == ("multipole", 0.1)
    assert {"multipole", "squeezed", "dense"} <= set(details["methods"])
    assert str(indices) not in str(details)
    one = client.models.retrieve("doc:squeezed@5%")
    assert (one.sparsekv["method"], one.sparsekv["budget"]) == ("squeezed", 0.05)  # type: ignore[attr-defined]


def test_a_request_names_method_and_budget_either_way(client: OpenAI) -> None:
    def asked(model: str, **more: Any) -> dict[str, Any]:
        told = client.chat.completions.create(
            model=model,
            messages=[user(QUESTION)],  # type: ignore[list-item]
            max_tokens=2,
            extra_body={"sparsekv": more} if more else {},
        )
        details: dict[str, Any] = told.sparsekv  # type: ignore[attr-defined]
        return {name: details[name] for name in ("method", "budget")}

    assert asked("doc") == {"method": "multipole", "budget": 0.1}
    assert asked("doc:squeezed") == asked("doc", method="squeezed") == {"method": "squeezed", "budget": 0.1}
    assert asked("doc@64") == asked("doc", budget=64) == {"method": "multipole", "budget": 64}
    assert asked("doc:quest@2.5%") == asked("doc:quest", budget="2.5%") == {"method": "quest", "budget": 0.025}
    assert asked("doc", method="dense", prefill="own") == {"method": "dense", "budget": 1.0}
    for budget in (1, 1.0):  # one token and all tokens, which Python's == takes for the same
        assert repr(asked("doc", budget=budget)["budget"]) == repr(asked(f"doc@{budget}")["budget"]) == repr(budget)
    with pytest.raises(openai.BadRequestError, match=r"leave sparsekv\.method out"):
        asked("doc:quest", method="squeezed")


def test_an_answer_tells_its_sources(server: Server, indices: Path) -> None:
    """As `generate --sources` does, for each choice, and in a stream at its end."""
    expected = generated(indices, "--sources", "2")["sources"]
    body = {"model": "doc@100%", "messages": [user(QUESTION)], "max_tokens": LONG, "sparsekv": {"sources": 2}}
    with server.http() as http:
        whole = http.post("/v1/chat/completions", json=body | {"n": 2}).json()
        with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            streamed = events(answer.iter_lines())
    assert len(expected) == 2
    for told, choices in ((whole["sparsekv"]["sources"], 2), (streamed[-1]["sparsekv"]["sources"], 1)):
        assert [(one["index"], one["lines"], one["text"]) for one in told] == [
            (index, one["lines"], one["text"]) for index in range(choices) for one in expected
        ]


def test_an_answer_tells_how_much_attention_it_missed(server: Server, indices: Path) -> None:
    """As `generate --gauge` does; the answer is the same, and the server's measures have it."""
    gauged = "--gauge", "--method", "multipole"
    expected, before = generated(indices, *gauged, budget="20%"), server.metric("sparsekv_missed_mass_count")
    body = {"model": "doc:multipole@20%", "messages": [user(QUESTION)], "max_tokens": LONG, "sparsekv": {"gauge": True}}
    with server.http() as http:
        whole = http.post("/v1/chat/completions", json=body | {"n": 2}).json()
        with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            streamed = events(answer.iter_lines())
    assert [one["message"]["content"] for one in whole["choices"]] == [expected["text"]] * 2
    for told in (whole["sparsekv"]["gauge"], streamed[-1]["sparsekv"]["gauge"]):
        assert [(one["layer"], pytest.approx(one["missed"])) for one in told["layers"]] == [
            (one["layer"], one["missed"]) for one in expected["layers"]
        ]
        assert 0 < told["missed"] < 1
    assert server.metric("sparsekv_missed_mass_count") == before + 3
