"""Selection of the attacks that `make test` runs: a few of each kind; all others are marked as slow."""

from collections.abc import Iterable
from typing import Any

import pytest

Parameters = Any  # what pytest.param returns has no public name


def short_part(cases: Iterable[Parameters], *, every: int) -> list[Parameters]:
    """Return the cases, of which every `every`-th stays as it is and the others are marked as slow.

    Cases are values, tuples of values, or `pytest.param`.
    """
    return [case if number % every == 0 else _slow(case) for number, case in enumerate(cases)]


def _slow(case: Parameters) -> Parameters:
    if hasattr(case, "marks"):
        return pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
