"""Fresh cases in each run, and all that ever failed."""

import os
import time
from pathlib import Path

import pytest

from fuzz.case import draw
from fuzz.checks import failure
from fuzz.shrink import shrunk

CASES, PARTS = 200, 20
FIRST = int(os.environ.get("SPARSEKV_FUZZ_SEED", int(time.time()) * 1000))
FAILED = [
    int(line.partition("#")[0])
    for line in Path(__file__).with_name("failed_seeds.txt").read_text().splitlines()
    if line.partition("#")[0].strip()
]


def assert_right(seed: int) -> None:
    """Fail with a case as simple as can be found in some seconds, as a command, where the case of a seed fails."""
    found = failure(draw(seed))
    if found["kind"]:
        case = shrunk(draw(seed), lambda one: failure(one)["kind"], found["kind"], 20)
        pytest.fail(
            f"seed {seed}: {failure(case)['told'] or found['told']}\n"
            f'    python tests/fuzz/run.py --seed {seed}\n    python tests/fuzz/run.py --case "{case}"',
            pytrace=False,
        )


@pytest.mark.parametrize("part", range(PARTS))
def test_fresh_cases(part: int) -> None:
    for seed in range(FIRST + part * CASES // PARTS, FIRST + (part + 1) * CASES // PARTS):
        assert_right(seed)


@pytest.mark.parametrize("seed", FAILED)
def test_case_that_failed_once(seed: int) -> None:
    assert_right(seed)
