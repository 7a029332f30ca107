"""Runs the fuzzer, over all cores: `python tests/fuzz/run.py --seconds 60`.

One case alone: `--seed N`, or `--case "Case(...)"`.

Each worker is a process of one thread. One that crashes, or is silent for longer than a case may take, is a failure of
its seed; another takes its place. The exit code is 1 where a case failed.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[0] = str(HERE.parents[1])  # not this folder, whose names would stand for other modules

FIRST_CASE, EACH_CASE, SHRINKING = 300.0, 180.0, 40.0
"""Seconds that a worker's first case may take, which imports and compiles, each other one, and making it simple."""
SHRUNK_OF_A_KIND = 2
"""So many failures of one kind are made simple; the others are only told."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=None, help="stop after so many seconds")
    parser.add_argument(
        "--cases", type=int, default=None, help="stop after so many cases (200 if --seconds is not said)"
    )
    parser.add_argument("--first-seed", type=int, default=None, help="the first seed; by default one of the time")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes; by default one a core")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--log", type=Path, help="a file to which each failure is added, a line of JSON")
    parser.add_argument("--until-failures", type=int, default=None, help="stop after so many failures")
    parser.add_argument("--except", dest="left_out", type=Path, help="a file of seeds that are not run, one a line")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they were drawn")
    parser.add_argument("--seed", type=int, help="run this seed alone, here, and show its case and traceback")
    parser.add_argument("--case", help="run this case alone, here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    given = parsed()
    if given.worker:
        return work(given.device)
    if given.seed is not None or given.case is not None:
        return one_case(given)
    return Fuzzing(given).run()


def prepare() -> None:
    """Settings of a process that runs cases."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import tempfile

    import torch
    import transformers

    os.environ["SPARSEKV_CACHE"] = tempfile.mkdtemp(prefix="sparsekv-fuzz-cache-")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def one_case(given: argparse.Namespace) -> int:
    prepare()
    from fuzz.case import Case, draw
    from fuzz.checks import check

    case = draw(given.seed) if given.case is None else eval(given.case, {"Case": Case})
    print(case, flush=True)
    print(f"refused, as is due: {refusal}" if (refusal := check(case, given.device)) else "right")
    return 0


def work(device: str) -> int:
    """Answer each line of standard input, a request as JSON, by a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed meanwhile is no answer
    prepare()
    from fuzz.case import draw
    from fuzz.checks import failure
    from fuzz.shrink import shrunk

    for line in sys.stdin:
        request = json.loads(line)
        case = draw(request["seed"])
        if "kind" in request:
            simple = shrunk(case, lambda one: failure(one, device)["kind"], request["kind"], SHRINKING)
            answer: dict[str, Any] = failure(simple, device) | {"case": repr(simple)}
        else:
            answer = failure(case, device) | {"case": repr(case)}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


class Worker:
    """A process that runs cases."""

    def __init__(self, device: str):
        self.device = device
        self.process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a request; where there is none in time the process ends, and the next one begins another."""
        if self.process is None:
            self._start()
            seconds += FIRST_CASE
        process = self.process
        assert process is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{json.dumps(request)}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        late = not timer.is_alive()
        timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self.process = None
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        code = process.wait()
        ended = f"no end after {seconds:.0f} s" if late else f"its process ended with {code}"
        return {"kind": "hang" if late else "crash", "told": ended, "case": ""}

    def _start(self) -> None:
        command = [sys.executable, str(HERE), "--worker", "--device", self.device]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | threads
        )

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Fuzzing:
    """A run over seeds in order, until time, cases or failures are enough."""

    def __init__(self, given: argparse.Namespace):
        self.given = given
        self.first = int(time.time()) * 1000 if given.first_seed is None else given.first_seed
        self.cases = given.cases if given.cases is not None or given.seconds is not None else 200
        self.began = time.monotonic()
        self.lock = threading.Lock()
        self.given_out = self.ran = 0
        self.kinds: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.failed: dict[int, str] = {}
        out = given.left_out.read_text().split() if given.left_out is not None else []
        self.left_out = {int(seed) for seed in out}
        self.errors: queue.Queue[BaseException] = queue.Queue()

    def run(self) -> int:
        print(f"seeds from {self.first}, {self.given.workers} workers, {self.given.device}", flush=True)
        threads = [threading.Thread(target=self._work) for _ in range(self.given.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not self.errors.empty():
            raise self.errors.get()
        took = time.monotonic() - self.began
        print(f"{self.ran} cases in {took:.0f} s, {len(self.failed)} failures, {sum(self.refused.values())} refused")
        for told, times in self.refused.most_common():
            print(f"  refused {times:5}: {told}")
        for kind, times in self.kinds.most_common():
            print(f"  failed  {times:5}: {kind}: seeds {' '.join(str(s) for s, k in self.failed.items() if k == kind)}")
        return bool(self.failed)

    def _next(self) -> int | None:
        with self.lock:
            enough = self.given.until_failures is not None and len(self.failed) >= self.given.until_failures
            late = self.given.seconds is not None and time.monotonic() - self.began > self.given.seconds
            if enough or late or (self.cases is not None and self.given_out >= self.cases):
                return None
            self.given_out += 1
            return self.first + self.given_out - 1

    def _work(self) -> None:
        worker = Worker(self.given.device)
        try:
            while (seed := self._next()) is not None:
                if seed in self.left_out:
                    continue
                self._take(worker, seed, worker.ask({"seed": seed}, EACH_CASE))
        except BaseException as error:
            self.errors.put(error)
        finally:
            worker.end()

    def _take(self, worker: Worker, seed: int, answer: dict[str, Any]) -> None:
        kind = answer["kind"]
        with self.lock:
            self.ran += 1
            if not kind:
                if answer["told"]:
                    self.refused[answer["told"][:60]] += 1
                return
            self.kinds[kind] += 1
            self.failed[seed] = kind
            shrink = self.kinds[kind] <= SHRUNK_OF_A_KIND and not self.given.no_shrink and answer["case"]
        simple = worker.ask({"seed": seed, "kind": kind}, EACH_CASE + 2 * SHRINKING) if shrink else answer
        if simple["kind"] != kind:  # it does not fail each time
            simple = answer
        with self.lock:
            print(f"FAILED seed {seed}: {simple['told']}", flush=True)
            if simple["case"]:
                print(
                    f'    python tests/fuzz/run.py --device {self.given.device} --case "{simple["case"]}"', flush=True
                )
            if self.given.log is not None:
                with self.given.log.open("a") as log:
                    print(json.dumps({"seed": seed, **simple}), file=log)


if __name__ == "__main__":
    sys.exit(main())
