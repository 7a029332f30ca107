"""Time a batch and an answer on a CPU that other processes use too, with several settings of torch's threads.

    sparsekv build-index manual.txt
    python docs/benchmarks/shared_machine.py manual.skv --load 4 --rounds 5

The settings are the number of threads, and how idle threads wait. Each round runs every variant once, one after
another, in a process of its own. The second number of a printed pair is the number of cores that other processes used
meanwhile. Without `--load`, use `--quiet 0.1` to keep only measurements during which other processes used at most 0.1
cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CORES = str(len(os.sched_getaffinity(0)))
VARIANTS = {
    "sparsekv's own": {},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "all threads, passive": {"OMP_NUM_THREADS": CORES, "OMP_WAIT_POLICY": "passive"},
    "all threads, 20,000 spins": {"OMP_NUM_THREADS": CORES, "GOMP_SPINCOUNT": "20000"},
    "all threads, 300,000 spins": {"OMP_NUM_THREADS": CORES, "GOMP_SPINCOUNT": "300000"},
}
"""Environment variables of each variant. The last variant has libgomp's default number of spins."""
SET_HERE = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
QUESTIONS = (
    "What is an assignment?",
    "What is a target?",
    "How is a loop written?",
    "What does return do?",
    "What is a class?",
    "What is a lambda?",
)
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(1_000_000))"
"""Program of a busy process, which ends when its parent process ends, even if the parent is killed."""


def measure(index: str, tokens: int, repeats: int) -> None:
    """Time batches and single answers; print, as JSON, each one's seconds and the cores that other processes used."""
    from sparsekv.runtime import api
    from sparsekv.runtime.decoding.answer import Sampling
    from sparsekv.runtime.decoding.threads import left_free, usage

    asker = api.open_index(index).asker()

    def timed(deed: Callable[[], object]) -> tuple[float, float]:
        before, started = usage(), time.perf_counter()
        deed()
        seconds, now = time.perf_counter() - started, usage()
        assert before is not None
        assert now is not None
        return seconds, int(CORES) - left_free(before, now, int(CORES))

    asker.ask_all(QUESTIONS, Sampling(max_new_tokens=2))
    found = [timed(lambda: asker.ask_all(QUESTIONS, Sampling(max_new_tokens=tokens))) for _ in range(repeats)]
    single = [timed(lambda: asker.ask(QUESTIONS[0], Sampling(max_new_tokens=2 * tokens))) for _ in range(repeats)]
    print(json.dumps({"batch": found, "answer": single}))


@contextmanager
def loaded(processes: int) -> Iterator[None]:
    """Keep this many other processes busy within the context."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in others:
            one.kill()
            one.wait()


def main() -> None:
    """Run all variants in turn, and print the median time of each."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("index")
    options.add_argument("--load", type=int, default=0, help="busy processes beside it")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--repeats", type=int, default=2, help="of a batch and of an answer in each process")
    options.add_argument("--tokens", type=int, default=12, help="of each answer of the batch; a single one has twice")
    options.add_argument("--quiet", type=float, default=float("inf"), help="leave out repeats beside more busy cores")
    options.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    options.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.measure:
        measure(given.index, given.tokens, given.repeats)
        return
    plain = {name: value for name, value in os.environ.items() if name not in SET_HERE}
    again = [sys.executable, __file__, given.index, "--measure", f"--tokens={given.tokens}"]
    found: dict[tuple[str, str], list[float]] = {}
    with loaded(given.load):
        for number in range(given.rounds):
            for name in given.variants:
                run = [*again, f"--repeats={given.repeats}"]
                told = subprocess.run(run, env=plain | VARIANTS[name], check=True, capture_output=True, text=True)
                for kind, repeats in json.loads(told.stdout).items():
                    kept = [seconds for seconds, others in repeats if others <= given.quiet]
                    found.setdefault((name, kind), []).extend(kept)
                    print(number, name, kind, [(round(one, 2), round(others, 2)) for one, others in repeats])
    for (name, kind), seconds in found.items():
        if seconds:
            print(
                f"{name:28} {kind:8} {statistics.median(seconds):7.2f} s, of {len(seconds)}, least {min(seconds):.2f}"
            )


if __name__ == "__main__":
    main()
