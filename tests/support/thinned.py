"""Which cases of a test of several parameters `make test` runs, where it is marked as thinned; all others are slow."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations

import pytest

Case = Sequence[Hashable]
"""A value for each axis: for a mark's parameters, or for a fixture's parameter."""


def mark_rest_slow(items: Iterable[pytest.Item]) -> None:
    """Mark as slow those cases of thinned tests that are not needed to cover their axes."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and "thinned" in marks and "slow" not in marks:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        kept = covering([_values(case) for case in cases])
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker(pytest.mark.slow)


def covering(cases: Sequence[Case]) -> set[int]:
    """Numbers of cases in which every pair of values of different axes occurs, or of two axes every value.

    A fault mostly shows by one value, or by two together. Each time the case is taken that brings most that is new, of
    several the one whose values have been taken least.
    """
    size = max(1, min(2, len(cases[0]) - 1))
    parts = [{*combinations(enumerate(case), size)} for case in cases]
    missing, kept, taken = set().union(*parts), set[int](), Counter[tuple[int, Hashable]]()
    while missing:
        gains = [
            (len(of_case & missing), -sum(taken[at] for at in enumerate(case)))
            for of_case, case in zip(parts, cases, strict=True)
        ]
        best = gains.index(max(gains))
        kept.add(best)
        missing -= parts[best]
        taken.update(enumerate(cases[best]))
    return kept


def _values(item: pytest.Function) -> Case:
    """Parameters by their identity, which they share between cases: tensors have no hash of their value."""
    left = {name: id(value) for name, value in item.callspec.params.items()}
    axes: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        axes.append(tuple(left.pop(name.strip()) for name in names))
    return [*axes, *left.values()]
