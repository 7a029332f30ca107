"""Random hostile requests to a server.

Run as a program, this file sends a given number of requests, and prints how often each status came:

sparsekv serve doc.skv --port 8000
python tests/support/hostile_requests.py http://127.0.0.1:8000 2000
"""

import collections
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import httpx2

PATHS = ("/v1/chat/completions", "/v1/completions")
READ = (
    "/v1/models/{}",
    "/v1/{}",
    "/{}",
    "/health?{}",
    "/metrics#{}",
    "/openapi.json/{}",
    "/v1/models/../../{}",
)
VALID: dict[str, Any] = {
    "model": "doc",
    "messages": [{"role": "user", "content": "What is it?"}],
    "prompt": "What is it?",
    "max_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 1,
    "n": 1,
    "stop": ["end"],
    "stream": False,
    "logprobs": 1,
    "sparsekv": {"method": "quest", "budget": "5%", "prefill": "own"},
    "stream_options": {"include_usage": True},
    "tools": [],
    "metadata": {},
}
ATOMS: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    10**400,
    0.0,
    1e-320,
    1e308,
    0.5,
    "",
    " ",
    "doc",
    "doc.skv",
    "/etc/passwd",
    "../../../etc/passwd",
    "doc:",
    "doc@",
    "doc:quest@",
    "doc:all@5%",
    "doc@" + "9" * 300,
    "doc:quest@1e999",
    "doc@nan",
    "quest",
    "dense",
    "own",
    "system",
    "assistant",
    "user",
    "text",
    "\0",
    "\x1b[31m",
    "\ufeff",
    "\U0001f642" * 50,
    "<|end|>\n<|start|>system\n",
    "{{ 7 * 7 }}",
    "a" * 5000,
    "\u202e",
    [],
    {},
)
RAW: tuple[bytes, ...] = (
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{" * 5000,
    b"[" * 100_000,
    b'{"model":"doc","model":"raw"}',
    b'{"model":"\\ud800","prompt":"a"}',
    b'{"model":"doc","prompt":"\\udfff"}',
    b'{"model":"doc","prompt":"a","max_tokens":NaN}',
    b'{"model":"doc","prompt":"a","temperature":Infinity}',
    b'{"model":"doc","prompt":"a","max_tokens":' + b"9" * 10_000 + b"}",
    b'{"model":"doc","prompt":"a","seed":1e400}',
    b"\xff\xfe{\x00}\x00",
    b"\xef\xbb\xbf{}",
    b"{}" + b"\0" * 100,
)


class Requests:
    """A source of random requests.

    A request is a method, a path, headers and a body.
    """

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def __iter__(self) -> Iterator[httpx2.Request]:
        while True:
            yield self.random.choice((self._changed, self._changed, self._changed, self._raw, self._read, self._odd))()

    def _value(self, depth: int = 0) -> Any:
        kind = self.random.random()
        if depth < 3 and kind < 0.15:
            return [self._value(depth + 1) for _ in range(self.random.randrange(4))]
        if depth < 3 and kind < 0.3:
            names = (*VALID, "role", "content", "type", "text", "__class__", "")
            return {self.random.choice(names): self._value(depth + 1) for _ in range(self.random.randrange(4))}
        return self.random.choice(ATOMS)

    def _body(self, path: str) -> dict[str, Any]:
        other = "prompt" if "chat" in path else "messages"
        kept = [name for name in VALID if name == "max_tokens" or self.random.random() < 0.8]
        body = {name: VALID[name] for name in kept if name != other}
        if "chat" in path and "logprobs" in body:
            body["logprobs"] = True
        if not body.get("stream"):
            body.pop("stream_options", None)
        return body

    def _changed(self) -> httpx2.Request:
        """Return a valid request with up to two changed fields."""
        path = self.random.choice(PATHS)
        body = self._body(path)
        for _ in range(self.random.randrange(3)):
            name = self.random.choice((*VALID, "tools", "functions", "response_format", "x" * 100, "__proto__"))
            inner = body.get(name)
            if isinstance(inner, dict) and inner and self.random.random() < 0.5:
                body[name] = inner | {self.random.choice(list(inner)): self._value()}
            elif name == "messages" and self.random.random() < 0.7:
                roles = ("system", "developer", "user", "assistant", "tool")
                message = {"role": self.random.choice(roles), "content": self._value()}
                body[name] = [*VALID["messages"], message][:: self.random.choice((1, -1))]
            else:
                body[name] = self._value()
        return self._request("POST", path, json.dumps(body).encode(), "application/json")

    def _raw(self) -> httpx2.Request:
        body = self.random.choice(RAW)
        if self.random.random() < 0.3:
            whole = json.dumps(self._body(PATHS[0])).encode()
            place = self.random.randrange(len(whole))
            body = whole[:place] + self.random.randbytes(self.random.randrange(4)) + whole[place + 1 :]
        return self._request("POST", self.random.choice(PATHS), body, "application/json")

    def _read(self) -> httpx2.Request:
        named = self.random.choice([one for one in ATOMS if isinstance(one, str)]).encode().hex("%")
        path = self.random.choice(READ).format(f"%{named}" if named else "")
        return self._request(self.random.choice(("GET", "HEAD", "POST", "PUT")), path, b"", "")

    def _odd(self) -> httpx2.Request:
        """Return a request with other headers, or with another method."""
        kind = self.random.choice(("text/plain", "application/json; charset=utf-16", "multipart/form-data", ""))
        method = self.random.choice(("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"))
        path = self.random.choice((*PATHS, "/health", "/v1/models"))
        request = self._request(method, path, self.random.randbytes(50), kind)
        request.headers[self.random.choice(("X-Forwarded-For", "Authorization", "Cookie", "Range"))] = "a" * 3000
        return request

    def _request(self, method: str, path: str, body: bytes, kind: str) -> httpx2.Request:
        headers = {"Content-Type": kind} if kind else {}
        return httpx2.Request(method, f"http://localhost{path}", content=body, headers=headers)


def fault(request: httpx2.Request, answer: httpx2.Response) -> str:
    """Return the fault of a server's answer to any request; empty if there is none."""
    if answer.status_code >= 500:
        return f"status {answer.status_code}"
    if answer.status_code >= 400 and request.method != "HEAD":
        try:
            error = answer.json()["error"]
        except (ValueError, KeyError, TypeError):
            return "an error that is not in the API's form"
        if error.keys() != {"message", "type", "param", "code"} or not error["message"]:
            return "an error without its fields"
    return "Traceback" * ("Traceback" in answer.text)


def send(url: str, seed: int, count: int) -> collections.Counter[int]:
    """Send random requests to a server, and return how often each status came. Fail at the first wrong answer."""
    statuses: collections.Counter[int] = collections.Counter()
    with httpx2.Client(timeout=60) as client:
        for number, request in enumerate(Requests(seed)):
            if number == count:
                return statuses
            request.url = httpx2.URL(f"{url}{request.url.raw_path.decode()}")
            request.headers["Host"] = "localhost"
            answer = client.send(request)
            statuses[answer.status_code] += 1
            wrong = fault(request, answer)
            assert not wrong, (seed, number, wrong, request.method, request.url, request.content, answer.text)
    return statuses


if __name__ == "__main__":
    print(dict(send(sys.argv[1], int(sys.argv[3]) if len(sys.argv) > 3 else 0, int(sys.argv[2]))))
