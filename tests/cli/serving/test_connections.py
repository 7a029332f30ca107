"""Clients that go away, send half a request or read slowly, and signals: others are answered meanwhile."""

import asyncio
import contextlib
import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.command import run_here, sparsekv
from support.serving import Server, begin, serving, user
from support.tiny_models import POSITIONS

from sparsekv.cli.serving.errors import ApiError
from sparsekv.cli.serving.responses import Answers
from sparsekv.formats.index.reader import Artifact
from sparsekv.runtime.serving.stream import Channel, Piece, Stream

CHAT = "/v1/chat/completions"
SHORT: dict[str, Any] = {"model": "doc", "messages": [user("What is it?")], "max_tokens": 2}
LONG = SHORT | {"max_tokens": 2000, "stream": True}
GONE = f'sparsekv_requests_total{{path="{CHAT}",status="499"}}'
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connection(server: Server, sent: str) -> socket.socket:
    """A connection over which some bytes were sent."""
    one = socket.create_connection(server.address)
    one.sendall(sent.encode())
    return one


def posted(body: dict[str, Any]) -> str:
    content = json.dumps(body)
    return f"{HEAD}Content-Length: {len(content)}\r\n\r\n{content}"


@pytest.fixture
def http(server: Server) -> Iterator[httpx2.Client]:
    with server.http() as client:
        yield client


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place(server: Server, http: httpx2.Client, stream: bool) -> None:
    ended, gone = server.metric("sparsekv_answer_tokens_total"), server.metric(GONE)
    one = connection(server, posted(LONG | {"stream": stream}))
    if stream:
        assert one.recv(100).startswith(b"HTTP/1.1 200 OK")
    else:
        server.until("sparsekv_running", 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # as a killed process's: by a reset
    one.close()
    server.until("sparsekv_running", 0)
    assert server.metric("sparsekv_answer_tokens_total") - ended < LONG["max_tokens"]
    server.until(GONE, gone + 1)
    assert http.post(CHAT, json=SHORT).status_code == 200


def test_half_requests_and_slow_readers_hold_up_nobody(server: Server, http: httpx2.Client) -> None:
    halves = (
        "",
        "POST /v1",
        HEAD,
        f"{HEAD}Content-Length: 900\r\n\r\n{{",
        f"{HEAD}Transfer-Encoding: chunked\r\n\r\n5",
    )
    waiting = [connection(server, half) for half in halves for _ in range(20)]
    reading = connection(server, posted(LONG | {"n": 2}))  # and never reads
    try:
        assert http.post(CHAT, json=SHORT).status_code == 200
        assert http.get("/health").status_code == 200
    finally:
        for one in (*waiting, reading):
            one.close()
    server.until("sparsekv_running", 0)


def test_a_client_that_never_reads_is_cut_off(indices: Path) -> None:
    """Its answers end, and so does its connection."""
    longest = 2000
    body = LONG | {"n": 16, "logprobs": True, "top_logprobs": 20, "max_tokens": longest}
    with serving(indices, "doc.skv", "--model", "model", "--unread-timeout", "0.3") as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(server.address)
        deaf.sendall(posted(body).encode())
        server.until("sparsekv_answers_total", 16)
        assert server.metric("sparsekv_answer_tokens_total") < 16 * longest
        with server.http() as http:
            assert http.post(CHAT, json=SHORT).status_code == 200
        with contextlib.suppress(ConnectionResetError):
            while deaf.recv(1 << 16):
                pass


@pytest.mark.parametrize("garbage", ["\x16\x03\x01\x02", "GET\r\n\r\n", "\0" * 70_000])
def test_what_is_not_http_is_refused(server: Server, http: httpx2.Client, garbage: str) -> None:
    with connection(server, garbage + "\r\n\r\n") as one:
        assert one.recv(1000).startswith(b"HTTP/1.1 400")
    assert http.get("/health").status_code == 200


def test_sigterm_completes_what_has_begun_and_refuses_more(indices: Path) -> None:
    """The answer is long: it must still run when the second request comes from a process that waits for a core."""
    server = begin(indices, "doc.skv", "--model", "model", "--drain", "60")
    body = LONG | {"max_tokens": 1000}
    with server.http() as client, server.http() as other, client.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.send(signal.SIGTERM)
        while (health := other.get("/health")).status_code == 200:
            pass
        refused = other.post(CHAT, json=SHORT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert (health.status_code, health.json()) == (503, {"status": "draining"})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutdown"
    run = server.started.wait()
    assert run.code == 0, run
    assert "accepted requests are completed" in run.stderr


def test_an_answer_that_outlasts_the_drain_ends_with_an_error(indices: Path) -> None:
    server = begin(indices, "doc.skv", "--model", "model", "--drain", "0")
    with server.http() as client, client.stream("POST", CHAT, json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.send(signal.SIGINT)
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutdown"
    run = server.started.wait()
    assert run.code == 130, run
    assert run.stderr.splitlines()[-1] == "sparsekv: interrupted; answers that were not complete ended with an error"


def test_a_second_ctrl_c_ends_answers_with_an_error(indices: Path) -> None:
    server = begin(indices, "doc.skv", "--model", "model", "--drain", "60")
    whole = connection(server, posted(LONG | {"stream": False}))
    with server.http() as client, whole, client.stream("POST", CHAT, json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.until("sparsekv_running", 2)
        server.send(signal.SIGINT)
        while client_health(server) == 200:
            pass
        server.send(signal.SIGINT)
        last = [line for line in lines if line][-1]
        told = b"".join(iter(lambda: whole.recv(1 << 16), b""))
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutdown"
    assert told.startswith(b"HTTP/1.1 503")
    assert b'"code":"shutdown"' in told
    run = server.started.wait()
    assert run.code == 130, run
    assert "Traceback" not in run.stderr


def client_health(server: Server) -> int:
    with server.http() as client:
        return client.get("/health").status_code


def test_one_ctrl_c_ends_an_idle_server_well(indices: Path) -> None:
    run = begin(indices, "doc.skv", "--model", "model").end(signal.SIGINT)
    assert run.code == 0, run
    assert run.stderr.splitlines()[-1].endswith("ended")
    assert "interrupted" not in run.stderr


def test_an_answer_that_takes_too_long_ends_with_an_error(indices: Path) -> None:
    server = begin(indices, "doc.skv", "--model", "model", "--timeout", "0.1", "-q")
    with server.http() as client:
        whole = client.post(CHAT, json=LONG | {"stream": False})
        with client.stream("POST", CHAT, json=LONG) as answer:
            last = [line for line in answer.iter_lines() if line][-1]
    assert whole.status_code == 504
    assert whole.json()["error"]["code"] == "timeout"
    assert whole.headers["x-should-retry"] == "false"
    assert "timeout" in last
    assert server.end().code == 0


def test_many_ask_at_once(server: Server) -> None:
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        with server.http() as client:
            body = SHORT | {"model": "doc@100%", "messages": [user(f"What is {number % 3}?")], "max_tokens": 12}
            texts[number] = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(texts) == 24
    assert all(texts[number] == texts[number % 3] for number in texts)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("doc.skv", "--indices-from", "other"), "doc.skv would both be served as doc"),
        (("doc.skv", "--indices-from", "doc.skv"), "give it as INDEX: `sparsekv serve doc.skv`"),
        (("doc.skv", "--cors", "notanorigin"), "--cors notanorigin is not an origin"),
        (("doc.skv", "--api-key-file", "spaced"), "line 3: the key has a space"),
        (("none.skv",), "none.skv"),
        ((), "name one as an argument: `sparsekv serve doc.skv`"),
        (("doc.skv", "--api-key-file", "none"), "--api-key-file none cannot be read"),
        (("doc.skv", "--api-key-file", "/dev/null"), "has no key"),
        (("doc.skv", "--host", "nowhere.invalid"), "--host nowhere.invalid"),
        (("doc.skv", "--host", "192.0.2.1"), "--host 192.0.2.1 is not an address of this machine"),
        (("doc.skv", "--budget", "0"), "--budget 0 is not a budget"),
        (("doc.skv", "--temperature", "-1"), "--temperature -1"),
    ],
)
def test_a_server_that_cannot_be_is_refused(indices: Path, options: tuple[str, ...], told: str) -> None:
    (indices / "other" / "doc.skv").mkdir(parents=True, exist_ok=True)
    (indices / "other" / "doc.skv" / "manifest.json").write_text("{}")
    (indices / "spaced").write_text("# keys\n\none two\n")
    done = sparsekv("serve", *options, "--port", "0", cwd=indices)
    assert done.returncode in (1, 2), done
    assert done.stdout == ""
    assert told in done.stderr.splitlines()[-1]


def test_a_port_that_is_taken_is_told(server: Server, indices: Path) -> None:
    done = sparsekv("serve", "doc.skv", "--port", str(server.address[1]), cwd=indices)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {server.address[1]}: address already in use" in done.stderr


def test_a_missing_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # as if it were not installed
    outcome = run_here("serve", "doc.skv")
    assert outcome.code == 1
    assert outcome.error() == "serve needs uvicorn, which is not installed; pip install 'sparsekv[serve]'"


def test_an_index_named_twice_is_served_once_and_lengths_are_clipped(indices: Path) -> None:
    """The question leaves few positions to its answer."""
    options = ("--max-new-tokens", str(10**11))
    question = "?" * (POSITIONS - Artifact(indices / "doc.skv").manifest.prompt.tokens - 60)
    with serving(indices, "doc.skv", "./doc.skv", "--model", "model", *options) as server, server.http() as http:
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["doc"]
        for asked in ({"max_tokens": 10**11}, {"max_tokens": None}):
            answer = http.post(CHAT, json=SHORT | asked | {"messages": [user(question)]}).json()
            assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_request_that_never_got_a_slot_is_told_that_the_server_was_busy() -> None:
    channel = Channel()
    channel.put(Piece("", finish="waited"))
    with pytest.raises(ApiError, match="server was busy") as raised:
        asyncio.run(Answers([Stream(channel)]).first())
    assert (raised.value.status, raised.value.headers) == (503, {"Retry-After": "1"})
