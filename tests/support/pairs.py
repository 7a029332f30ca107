"""Tests of several parameters in which every pair of values occurs, with a fraction of all combinations."""

from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest
import torch

Combination = tuple[int, ...]
"""A combination of values: the index of one value for each parameter."""


def every_pair(axes: Mapping[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrize a test so that every two values of different parameters occur together in at least one case.

    Most faults show with one value, or with two values together, and so a few cases find most faults. On a GPU all
    combinations run, because each is compiled to a program of its own.

    Args:
        axes: values by the parameter's name, as pytest takes them: tuples of values for several names, "Q, T".
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
    """Choose combinations until all pairs occur: each time the one with most pairs that have not occurred yet."""
    pairs = {one: {*combinations(enumerate(one), 2)} for one in product(*map(range, sizes))}
    if torch.cuda.is_available():
        return [*pairs]
    apart, found = set[Any]().union(*pairs.values()), []
    while apart:
        found.append(max(pairs, key=lambda one: len(pairs[one] & apart)))
        apart -= pairs[found[-1]]
    return found
