"""Runs the fuzzer on all cores: `python tests/fuzz/run.py --seconds 60`.

`--seed N`, or `--case "Case(...)"`, runs one case.

Each worker is a process of one thread. If a worker crashes, or is silent for longer than a case may take, its seed has
failed, and another worker takes its place. The exit code is 1 if a case failed.

On a GPU: `--device cuda --workers 16 --gpus 2`. Workers share the GPUs, and a folder of compiled kernels, which is
TRITON_CACHE_DIR or a folder in memory. A run draws its shapes and options from a palette, whose number is its first
seed, so that few kernels are compiled. A case that takes too long there is reported as slow. It runs again with more
time, when its kernels are in that folder, and fails if it takes too long again.
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
"""Seconds for a worker's first case, which imports and compiles, for each other case, and for simplifying a case."""
SLOW = 3
"""Factor of the time for a case on a GPU that was too slow at first."""
COMPILED = Path("/dev/shm/sparsekv-fuzz-triton")
"""Folder of compiled kernels, of all workers and later runs, unless TRITON_CACHE_DIR names another one."""
LOST_GPU = "AcceleratorError"
"""Kind of a failure after which no call of its process to the GPU works."""
SHRUNK_OF_A_KIND = 2
"""Number of failures of one kind that are simplified; the others are only reported."""
TOLD_EACH = 60.0
"""Seconds between two lines with the number of cases so far, so that a stopped run has printed what it did."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=None, help="stop after this number of seconds")
    parser.add_argument(
        "--cases", type=int, default=None, help="stop after this number of cases (200 without --seconds)"
    )
    parser.add_argument("--first-seed", type=int, default=None, help="the first seed; by default from the time")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes; by default one per core")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs, over which workers are spread in turn")
    parser.add_argument("--palette", type=int, help="number of the palette; by default the first seed on a GPU")
    parser.add_argument("--log", type=Path, help="a file to which each failure is added as a line of JSON")
    parser.add_argument("--until-failures", type=int, default=None, help="stop after this number of failures")
    parser.add_argument("--except", dest="left_out", type=Path, help="a file of seeds that are not run, one per line")
    parser.add_argument("--deed", default="", help="a deed that all cases get instead of their own")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they were drawn")
    parser.add_argument("--seed", type=int, help="run only this seed, in this process, and show its case and traceback")
    parser.add_argument("--case", help="run only this case, in this process")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    given = parsed()
    if given.worker:
        return work(given)
    if given.seed is not None or given.case is not None:
        return one_case(given)
    return Fuzzing(given).run()


def prepare() -> None:
    """Set up a process that runs cases."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # cases of several threads run beside other workers
    import tempfile

    import torch
    import transformers
    from support.freed_memory import keep_freed_memory
    from support.unsynced import sync_nothing

    os.environ["SPARSEKV_CACHE"] = tempfile.mkdtemp(prefix="sparsekv-fuzz-cache-")
    torch.set_num_threads(1)
    keep_freed_memory()
    sync_nothing()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def one_case(given: argparse.Namespace) -> int:
    prepare()
    from fuzz.case import Case
    from fuzz.checks import check

    case = drawn(given, given.seed) if given.case is None else eval(given.case, {"Case": Case})
    print(case, flush=True)
    print(f"refused, as is due: {refusal}" if (refusal := check(case, given.device)) else "right")
    return 0


def drawn(given: argparse.Namespace, seed: int) -> Any:
    """Return the case of a seed, in a run with these options."""
    from dataclasses import replace

    from fuzz.case import Palette, draw

    case = draw(seed, Palette(given.palette))
    return replace(case, deed=given.deed) if given.deed else case


def work(given: argparse.Namespace) -> int:
    """Answer each line of standard input, a request as JSON, by a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other prints of this process go to stderr, so that stdout has only answers
    prepare()
    from fuzz.checks import failure
    from fuzz.shrink import shrunk

    device = given.device
    for line in sys.stdin:
        request = json.loads(line)
        case = drawn(given, request["seed"])
        if "kind" in request:
            simple = shrunk(case, lambda one: failure(one, device)["kind"], request["kind"], SHRINKING)
            answer: dict[str, Any] = failure(simple, device) | {"case": repr(simple)}
        else:
            answer = failure(case, device) | {"case": repr(case)}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


class Worker:
    """A process that runs cases, with its number among the workers; it keeps the kernels that it has compiled."""

    def __init__(self, given: argparse.Namespace, number: int):
        self.given, self.number = given, number
        self.process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a request.

        Without an answer in time, the process ends, and the next request starts another one.
        """
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
            if answer["kind"].startswith(LOST_GPU):
                self.end()
                self.process = None
            return answer
        self.process = None
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        code = process.wait()
        ended = f"no end after {seconds:.0f} s" if late else f"its process ended with {code}"
        return {"kind": "hang" if late else "crash", "told": ended, "case": ""}

    def _start(self) -> None:
        given = self.given
        command = [sys.executable, str(HERE), "--worker", "--device", given.device, "--deed", given.deed]
        command += [] if given.palette is None else ["--palette", str(given.palette)]
        environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        if given.device == "cuda":
            environment.setdefault("TRITON_CACHE_DIR", str(COMPILED))
            seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            gpus = seen.split(",") if seen else [str(number) for number in range(given.gpus)]
            environment["CUDA_VISIBLE_DEVICES"] = gpus[self.number % min(given.gpus, len(gpus))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Fuzzing:
    """A run over seeds in order, until the limit of time, cases or failures."""

    def __init__(self, given: argparse.Namespace):
        self.given = given
        self.first = int(time.time()) * 1000 if given.first_seed is None else given.first_seed
        self.cases = given.cases if given.cases is not None or given.seconds is not None else 200
        self.began = self.told = time.monotonic()
        self.lock = threading.Lock()
        self.given_out = self.ran = 0
        self.kinds: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.failed: dict[int, str] = {}
        self.slow: list[int] = []
        if given.device == "cuda" and given.palette is None:
            given.palette = self.first
        out = given.left_out.read_text().split() if given.left_out is not None else []
        self.left_out = {int(seed) for seed in out}
        self.errors: queue.Queue[BaseException] = queue.Queue()

    def run(self) -> int:
        palette = "" if self.given.palette is None else f", palette {self.given.palette}"
        print(f"seeds from {self.first}, {self.given.workers} workers, {self.given.device}{palette}", flush=True)
        threads = [threading.Thread(target=self._work, args=(number,)) for number in range(self.given.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not self.errors.empty():
            raise self.errors.get()
        took = time.monotonic() - self.began
        print(f"{self.ran} cases in {took:.0f} s, {len(self.failed)} failures, {sum(self.refused.values())} refused")
        if self.slow:
            print(f"  slow    {len(self.slow):5}: run again with more time: seeds {' '.join(map(str, self.slow))}")
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

    def _work(self, number: int) -> None:
        worker = Worker(self.given, number)
        try:
            while (seed := self._next()) is not None:
                if seed in self.left_out:
                    continue
                answer = worker.ask({"seed": seed}, EACH_CASE)
                if answer["kind"] == "hang" and self.given.device == "cuda":
                    with self.lock:
                        self.slow.append(seed)
                    print(f"SLOW seed {seed}: {answer['told']}; it runs again", flush=True)
                    answer = worker.ask({"seed": seed}, SLOW * EACH_CASE)
                self._take(worker, seed, answer)
        except BaseException as error:
            self.errors.put(error)
        finally:
            worker.end()

    def _tell_count(self) -> None:
        now = time.monotonic()
        if now - self.told > TOLD_EACH:
            self.told = now
            print(f"{self.ran} cases in {now - self.began:.0f} s, {len(self.failed)} failures", flush=True)

    def _take(self, worker: Worker, seed: int, answer: dict[str, Any]) -> None:
        kind = answer["kind"]
        with self.lock:
            self.ran += 1
            self._tell_count()
            if not kind:
                if answer["told"]:
                    self.refused[answer["told"][:60]] += 1
                return
            self.kinds[kind] += 1
            self.failed[seed] = kind
            shrink = self.kinds[kind] <= SHRUNK_OF_A_KIND and not self.given.no_shrink and answer["case"]
        simple = worker.ask({"seed": seed, "kind": kind}, EACH_CASE + 2 * SHRINKING) if shrink else answer
        if simple["kind"] != kind:  # the simplified case did not fail in the same way
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
