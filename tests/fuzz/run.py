"""Runs the fuzzer: `python tests/fuzz/run.py --seconds 60`, or one case: `--seed N`, `--case "Case(...)"`."""

import argparse
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-seed", type=int, default=None)
    parser.add_argument("--cases", type=int, default=10)
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity_error()
    from fuzz.case import draw
    from fuzz.checks import check

    bad = 0
    from collections import Counter

    kinds = Counter()
    for seed in range(given.first_seed, given.first_seed + given.cases):
        case = draw(seed)
        t = time.perf_counter()
        try:
            told = check(case)
            if told:
                kinds["refused: " + told[:70]] += 1
        except Exception as error:
            bad += 1
            kinds[str(getattr(error, "kind", type(error).__name__))] += 1
            print("FAILED", seed, case, "\n   ", str(error)[:300])
            if not hasattr(error, "kind"):
                print("".join(traceback.format_exception(error)[-3:])[-900:])
        dt = time.perf_counter() - t
        if dt > 1.5:
            print("slow", seed, round(dt, 2), case)
    for k, n in kinds.most_common():
        print(n, k)
    return 0


if __name__ == "__main__":
    sys.exit(main())
