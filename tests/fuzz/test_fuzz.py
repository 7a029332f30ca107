"""New random cases in each run, and all cases that ever failed."""

import os
import time
from pathlib import Path

import pytest

from fuzz.case import Case, draw
from fuzz.checks import failure
from fuzz.shrink import shrunk

CASES, PARTS = 200, 20
FIRST = int(os.environ.get("SPARSEKV_FUZZ_SEED", int(time.time()) * 1000))
FAILED = [
    text.strip()
    for line in Path(__file__).with_name("failed_seeds.txt").read_text().splitlines()
    if (text := line.partition("#")[0]).strip()
]


def assert_right(case: Case, told: str) -> None:
    """Fail if a case fails, with a case as simple as can be found in some seconds, as a command."""
    found = failure(case)
    if found["kind"]:
        simple = shrunk(case, lambda one: failure(one)["kind"], found["kind"], 20)
        pytest.fail(
            f'{told}: {failure(simple)["told"] or found["told"]}\n    python tests/fuzz/run.py --case "{simple}"',
            pytrace=False,
        )


@pytest.mark.parametrize("part", range(PARTS))
def test_fresh_cases(part: int) -> None:
    for seed in range(FIRST + part * CASES // PARTS, FIRST + (part + 1) * CASES // PARTS):
        assert_right(draw(seed), f"seed {seed}")


@pytest.mark.parametrize("text", FAILED, ids=map(str, range(len(FAILED))))
def test_case_that_failed_once(text: str) -> None:
    assert_right(draw(int(text)) if text.isdigit() else eval(text, {"Case": Case}), text)
