"""Load `sparsekv serve` with one client and with many: speed, gaps between pieces of text, answers and memory.

    sparsekv build-index topics.txt --max-tokens 6144
    python docs/benchmarks/serve_load.py topics.skv --clients 32 --seconds 180

This program starts a server, asks it with one client and then with many, and compares each answer with that of
`generate` to the same question at a budget of 100%. With another `--budget` answers are not compared, because they
depend on the questions that are answered at the same time. A piece of text is mostly a word. With `--per-token` the
clients also request log-probabilities, and a gap is divided by the number of tokens of its piece. Options after `--`
are passed to `serve`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

QUESTIONS = (
    "What is an assignment?",
    "How is a loop written?",
    "What does return do?",
    "Which method is called to implement attribute deletion?",
    "What is a lambda?",
    "When is the else clause of a loop executed?",
    "What does the assert statement do?",
    "How is an exception raised, and what happens then?",
)
COMMAND = (sys.executable, "-m", "sparsekv.cli")


@dataclass
class Found:
    """Measurements of all clients: numbers of tokens, of answers and of wrong answers, times, and failed requests.

    `gaps` are the seconds between pieces of text, and `first` the seconds to an answer's first piece. `before_end` is
    the number of tokens while all clients still asked: an answer that ends later counts by the share of its time.
    """

    tokens: int = 0
    answers: int = 0
    wrong: int = 0
    before_end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass
class Load:
    """Clients that ask the same questions for some time; each asks its next question when it has its answer.

    Args:
        address: host and port of the server.
        body: fields of a request, besides its messages.
        expected: right answers by question; empty: answers are not compared.
    """

    address: tuple[str, int]
    body: dict[str, object]
    expected: dict[str, str]
    found: Found = field(default_factory=Found)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, clients: int, seconds: float) -> float:
        """Ask with some clients for some seconds; return the tokens per second of all until the last answer ends."""
        began = time.perf_counter()
        threads = [threading.Thread(target=self._ask_on, args=(one, began + seconds)) for one in range(clients)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        return self.found.tokens / (time.perf_counter() - began)

    def _ask_on(self, client: int, until: float) -> None:
        number = client
        while time.perf_counter() < until:
            question = QUESTIONS[number % len(QUESTIONS)]
            try:
                self._ask(question, until)
            except (OSError, ValueError, KeyError) as error:
                with self.lock:
                    self.found.failures.append(f"{type(error).__name__}: {error}")
                time.sleep(1)
            number += 1

    def _ask(self, question: str, until: float) -> None:
        connection = HTTPConnection(*self.address, timeout=600)
        body = json.dumps(self.body | {"messages": [{"role": "user", "content": question}]})
        asked = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(answer.read().decode())
        text, tokens, gaps, first, before = "", 0, list[float](), 0.0, 0.0
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event, now = json.loads(line[6:]), time.perf_counter()
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    text += piece
                    if before:
                        count = len(choice["logprobs"]["content"]) if choice["logprobs"] else 1
                        gaps.append((now - before) / count)
                    first, before = first or now - asked, now
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
        connection.close()
        if not tokens:
            raise ValueError(f"the stream ended early: {text[-80:]}")
        with self.lock:
            self.found.answers += 1
            self.found.tokens += tokens
            self.found.before_end += tokens * min(1.0, (until - asked) / (time.perf_counter() - asked))
            self.found.gaps += gaps
            self.found.first.append(first)
            self.found.wrong += bool(self.expected) and text.strip() != self.expected[question]


def expected_answers(index: str, tokens: int) -> dict[str, str]:
    """Return the answers of `generate` by question, at a budget of 100%, one question after another."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("\n".join(QUESTIONS))
        file.flush()
        options = ("--batch-file", file.name, "--batch-size", "1", "--budget", "100%", "--json", "-q")
        command = (*COMMAND, "generate", "--index", index, *options, "--max-new-tokens", str(tokens))
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {one["question"]: one["text"].strip() for one in map(json.loads, told.splitlines())}


@contextmanager
def served(index: str, *options: str) -> Iterator[tuple[tuple[str, int], int]]:
    """Run a server within the context; yield its host and port, and its process id."""
    command = (*COMMAND, "serve", index, "--port", "0", "-q", *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip().removesuffix("/v1").removeprefix("http://")
        host, _, port = address.rpartition(":")
        try:
            yield (host, int(port)), process.pid
        finally:
            process.terminate()


def resident(process: int) -> int:
    """Return the memory of a process in KiB, without pages mapped from files."""
    return int(Path(f"/proc/{process}/status").read_text().split("RssAnon:")[1].split()[0])


def watch(process: int, samples: list[tuple[float, int]], ended: threading.Event) -> None:
    """Append the time and a process's memory to `samples` each second, until `ended` is set."""
    while not ended.wait(1):
        samples.append((time.perf_counter(), resident(process)))


def percentile(values: list[float], share: float) -> float:
    """Return the value below which a share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def report(name: str, found: Found, speed: float) -> None:
    """Print the measurements of a load's clients; exit if they got no answer."""
    if not found.gaps:
        sys.exit(f"{name}: no answer; {found.failures[:1]}")
    median, late = statistics.median(found.gaps), percentile(found.gaps, 0.99)
    print(f"{name}: {found.answers} answers, {speed:.1f} tokens a second")
    print(f"  gap between pieces: median {median * 1e3:.1f} ms, p99 {late * 1e3:.1f} ms, {late / median:.2f} of it")
    print(f"  first piece: median {statistics.median(found.first):.2f} s, p99 {percentile(found.first, 0.99):.2f} s")
    print(f"  wrong answers: {found.wrong}; failures: {len(found.failures)} {found.failures[:1]}", flush=True)


def main() -> None:
    """Load the server with one client, then with many, and print both measurements."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("index")
    options.add_argument("--clients", type=int, default=32)
    options.add_argument("--seconds", type=float, default=180)
    options.add_argument("--alone", type=float, default=30, help="seconds for which one client asks")
    options.add_argument("--tokens", type=int, default=64, help="longest answer")
    options.add_argument("--method", default="", help="default: the index's first; `dense` has no budget")
    options.add_argument("--budget", default="100%")
    options.add_argument("--per-token", action="store_true")
    arguments = sys.argv[1:]
    own = arguments.index("--") if "--" in arguments else len(arguments)
    given, of_server = options.parse_args(arguments[:own]), arguments[own + 1 :]
    name = Path(given.index).absolute().name.removesuffix(".skv")
    if given.method:
        name = f"{name}:{given.method}"
    body = {
        "model": name if given.method == "dense" else f"{name}@{given.budget}",
        "max_tokens": given.tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": given.per_token,
    }
    expected = expected_answers(given.index, given.tokens) if given.budget == "100%" else {}
    with served(given.index, *of_server) as (address, process):
        Load(address, body, {}).run(1, 0.1)  # the first answer compiles kernels
        alone = Load(address, body, expected)
        speed = alone.run(1, given.alone)
        report("one client", alone.found, speed)
        samples, ended = list[tuple[float, int]](), threading.Event()
        watcher = threading.Thread(target=watch, args=(process, samples, ended))
        watcher.start()
        many = Load(address, body, expected)
        together = many.run(given.clients, given.seconds)
        ended.set()
        watcher.join()
    report(f"{given.clients} clients", many.found, together)
    print(f"tokens a second in all, against one client's: {together / speed:.2f}")
    print(f"tokens a second while all clients ask: {many.found.before_end / given.seconds:.1f}")
    part = given.seconds / 3
    first = [size for at, size in samples if at < samples[0][0] + part]
    last = [size for at, size in samples if at > samples[-1][0] - part]
    print(
        f"memory, first and last third: {statistics.mean(first) / 1024:.0f} MiB, {statistics.mean(last) / 1024:.0f} MiB"
    )


if __name__ == "__main__":
    main()
