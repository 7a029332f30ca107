"""Recording of selectors' queries and choices, and a check that a choice is the best one by given scores."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.selection.interface import Budget, Queries, Selection, Selector

from .small_layer import all_chosen


@dataclass(frozen=True)
class Choice:
    """A recorded choice of a layer: the log-sum-exp [Hk, G, Q] of exact rows and sinks, and the tokens of each head."""

    queries: Queries
    exact_logsumexp: torch.Tensor
    selection: Selection
    tokens: list[list[list[int]]]


@contextmanager
def recorded_choices(cache: IndexCache) -> Iterator[list[list[Choice]]]:
    """Within the context, record the choices of each sparse layer of a cache, one for each forward pass."""
    selectors = [layer.plan.selector for layer in cache.stored_layers if isinstance(layer, SparseLayer)]
    choices: list[list[Choice]] = [[] for _ in selectors]
    with pytest.MonkeyPatch.context() as patch:
        for selector, seen in zip(selectors, choices, strict=True):
            patch.setattr(selector, "select", _recording(selector, seen))
        yield choices


def _recording(selector: Selector, seen: list[Choice]) -> Any:
    select = selector.select

    def recording(queries: Queries, budget: Budget) -> Selection:
        selection = select(queries, budget)
        seen.append(Choice(queries, queries.exact_logsumexp(), selection, all_chosen(selection, selector)))
        return selection

    return recording


def assert_best(chosen: list[list[list[int]]], scores: torch.Tensor, tokens: int) -> None:
    """Fail unless each head and query has `tokens` distinct tokens, and no other token has a higher score.

    Args:
        chosen: the tokens of each head and query, as `all_chosen` returns them.
        scores: [Hk, Q, M] float64, Q as in `chosen`; up to 1e-5 of the largest counts as equal.
    """
    assert [len(of_head) for of_head in chosen] == [scores.shape[1]] * scores.shape[0]
    for of_head, score_of_head in zip(chosen, scores, strict=True):
        for picked, score in zip(of_head, score_of_head, strict=True):
            assert len(picked) == len(set(picked)) == tokens
            left = score.clone()
            left[picked] = -torch.inf
            assert float(left.max() - score[picked].min()) <= 1e-5 * float(score.abs().max())
