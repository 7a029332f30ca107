"""The real server, the command `serve` in a process of its own, and clients of the server."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from openai import DefaultHttpxClient, OpenAI

from .command import start
from .forked import Run, Started

LATE = 60.0  # seconds
WHOLE_RUN = 3600.0
"""Lifetime of a server in seconds. Parallel workers share a module's tests, and the last one may run late."""


@dataclass
class Server:
    """A running server: its address, which ends in /v1, and its process."""

    url: str
    started: Started
    folder: Path

    def openai(self, key: str = "none", *, strict: bool = True) -> OpenAI:
        """Return OpenAI's own client, without retries, because a second try would hide the server's first answer.

        Args:
            strict: check each answer against the client's types.
        """
        plain = DefaultHttpxClient(
            verify=False
        )  # certificates, which it never sees, take longer to read than an answer
        more: dict[str, Any] = {"max_retries": 0, "timeout": LATE, "_strict_response_validation": strict}
        return OpenAI(base_url=self.url, api_key=key, http_client=plain, **more)

    def http(self, **headers: str) -> httpx2.Client:
        """Return an HTTP client whose paths begin at the server's root."""
        return httpx2.Client(base_url=self.url.removesuffix("/v1"), headers=headers, timeout=LATE, verify=False)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removesuffix("/v1").removeprefix("http://").rpartition(":")
        return host, int(port)

    def send(self, number: int) -> None:
        os.kill(self.started.pid, number)

    def end(self, number: int = signal.SIGTERM) -> Run:
        """End the server by a signal, and return how it ended."""
        with contextlib.suppress(ProcessLookupError):
            self.send(number)
        return self.started.wait()

    def metric(self, name: str) -> float:
        """Return a metric of /metrics by its full name with labels; 0 if it is missing."""
        with self.http() as client:
            lines = client.get("/metrics").text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def until(self, name: str, value: float) -> None:
        """Wait until a metric has a value."""
        ends = time.monotonic() + LATE
        while (now := self.metric(name)) != value:
            assert time.monotonic() < ends, f"{name} is {now}, not {value}"
            time.sleep(0.02)


def begin(place: Path, *options: str | Path, stderr: str | None = None) -> Server:
    """Start a server on any free port, and wait until it accepts requests.

    Args:
        stderr: the file to which the server writes its messages; None: they are in the outcome of `end`.
    """
    told, standard = place / f"served-{time.monotonic_ns()}", {} if stderr is None else {"stderr": stderr}
    started = start("serve", *options, "--port", "0", cwd=place, seconds=WHOLE_RUN, stdout=str(told), **standard)
    ends = time.monotonic() + LATE
    while not (told.exists() and told.read_text().endswith("\n")):
        state = Path(f"/proc/{started.pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            raise AssertionError(started.wait().stderr)
        assert time.monotonic() < ends, "the server does not start"
        time.sleep(0.02)
    return Server(told.read_text().strip(), started, place)


@contextlib.contextmanager
def serving(place: Path, *options: str | Path, stderr: str | None = None) -> Iterator[Server]:
    """Run a server within the context. Fail if it printed a traceback, or did not end with exit code 0."""
    server = begin(place, *options, stderr=stderr)
    try:
        yield server
    finally:
        run = server.end()
        assert "Traceback" not in run.stderr, run.stderr
        assert run.code == 0, run


def events(lines: Iterator[str]) -> list[dict[str, Any]]:
    """Return the data of each event of a stream, which must end with [DONE]."""
    found: Sequence[str] = [line.removeprefix("data: ") for line in lines if line]
    assert found[-1] == "[DONE]", found[-1]
    return [json.loads(one) for one in found[:-1]]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
