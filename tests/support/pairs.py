"""Tests of many parameters: every pair of values meets, in a fraction of all combinations."""

from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest
import torch

Combination = tuple[int, ...]
"""Of one value an axis, each by its number."""


def every_pair(axes: Mapping[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrize a test so that every two values of different axes are together in one case at least.

    A fault mostly shows by one value, or by two together: so few cases find it as all combinations do. Where there is a
    GPU all combinations run, for there each is compiled to a program of its own.

    Args:
        axes: values by the parameter's name, as pytest takes them: tuples of values where a name is several, "Q, T".
    """
    values = [[*one] for one in axes.values()]
    together = [[name.strip() for name in names.split(",")] for names in axes]
    cases = []
    for numbers in _combinations(tuple(map(len, values))):
        chosen = [of_axis[number] for of_axis, number in zip(values, numbers, strict=True)]
        of_names = [one if len(names) > 1 else (one,) for names, one in zip(together, chosen, strict=True)]
        cases.append([value for one in of_names for value in one])
    return pytest.mark.parametrize([name for names in together for name in names], cases, ids=str)


def _combinations(sizes: tuple[int, ...]) -> list[Combination]:
    """Each time the combination that brings most pairs together that have not met."""
    pairs = {one: {*combinations(enumerate(one), 2)} for one in product(*map(range, sizes))}
    if torch.cuda.is_available():
        return [*pairs]
    apart, found = set[Any]().union(*pairs.values()), []
    while apart:
        found.append(max(pairs, key=lambda one: len(pairs[one] & apart)))
        apart -= pairs[found[-1]]
    return found
