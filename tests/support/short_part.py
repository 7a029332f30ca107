"""Which of many attacks `make test` runs: a few of each kind; all others are slow."""

from collections.abc import Iterable
from typing import Any

import pytest

Parameters = Any  # what pytest.param returns has no public name


def short_part(cases: Iterable[Parameters], *, every: int) -> list[Parameters]:
    """One case in so many as it is, the others marked as slow; cases are values, tuples of them, or `pytest.param`."""
    return [case if number % every == 0 else _slow(case) for number, case in enumerate(cases)]


def _slow(case: Parameters) -> Parameters:
    if hasattr(case, "marks"):
        return pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
