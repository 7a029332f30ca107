"""Selection of the cases of tests marked `thinned` that `make test` runs; all others are marked as slow."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations

import pytest

Case = Sequence[Hashable]
"""One value for each axis. An axis is the parameters of one mark, or the parameter of a fixture."""


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
    """Return the indices of cases in which every pair of values of different axes occurs, or every value if there are
    two axes.

    Most faults show with one value, or with two values together. The next case is always the one with most pairs that
    have not occurred yet; among several, the one whose values have occurred least.
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
    """Return a case's parameters by their identity, which cases share, because tensors have no hash of their value."""
    left = {name: id(value) for name, value in item.callspec.params.items()}
    axes: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        axes.append(tuple(left.pop(name.strip()) for name in names))
    return [*axes, *left.values()]
