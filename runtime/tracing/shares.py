"""Shares of one step's attention: what falls on each token of the middle, and what is attended exactly."""

from dataclasses import dataclass
from functools import cache
from typing import cast

import torch

from sparsekv.runtime.attention.executors import Fetched
from sparsekv.runtime.attention.step import Step
from sparsekv.runtime.reporting.recall import chosen_positions
from sparsekv.runtime.selection.capabilities import NumbersCentroids
from sparsekv.runtime.selection.interface import Selector
from sparsekv.runtime.selection.selection import Selection


@dataclass(frozen=True)
class AttendedStep:
    """One layer's step as it was attended to, of Q queries that share a choice: a selector's selection, in a layout's
    rows, what was fetched of it, and the weights [Hk, G, Q, T] of chosen rows, exact rows, centroids that stand for the
    rest, and learned sink logits, in this order."""

    step: Step
    selection: Selection
    selector: Selector
    layout: torch.Tensor | None
    fetched: Fetched
    weights: torch.Tensor


@dataclass(frozen=True)
class Shares:
    """Shares of a step's last query's attention, mean over the query heads of each KV head, which add up to one.

    exact [Hk]: of sinks, tail and new tokens; chosen [Hk, R]: of chosen tokens, at positions [Hk, R] int64,
    which are M in unused slots; others [1 or 2, Hk, M]: of each token of the middle what was stood for, and what was
    missed, where that is known; nowhere [Hk]: of centroids whose tokens are not known, which is stood for, too.
    """

    exact: torch.Tensor
    positions: torch.Tensor
    chosen: torch.Tensor
    others: torch.Tensor
    nowhere: torch.Tensor

    def totals(self) -> torch.Tensor:
        """[3 or 4, Hk]: exact, chosen, stood for, missed."""
        stood_for, *missed = self.others.sum(-1)
        return torch.stack([self.exact, self.chosen.sum(-1), stood_for + self.nowhere, *missed])


def own_shares(one: AttendedStep, middle: int) -> Shares:
    """The weights that the step itself gives; a centroid's is spread evenly over the tokens that it represents."""
    rows, exact, weights = one.fetched.keys.shape[1], one.step.exact.keys.shape[1], one.weights[:, :, -1].mean(1)
    rest = sum(part.keys.shape[1] for part in one.fetched.rest) if one.fetched.rest_attended else 0
    chosen, beside, of_rest = weights[:, :rows], weights[:, rows : rows + exact].sum(1), weights[:, rows + exact :]
    if one.step.how[2] is not None:
        beside, of_rest = beside + of_rest[:, -1], of_rest[:, :-1]
    positions = chosen_positions(one.selection.rows, one.layout, middle)[:, -1].to(weights.device)
    if not rest or not _numbers_centroids(type(one.selector)):
        return Shares(beside, positions, chosen, weights.new_zeros(1, len(weights), middle), of_rest.sum(1))
    numbers = cast(NumbersCentroids, one.selector).centroid_of(one.fetched.rest).to(weights.device)
    left = weights.new_ones(len(weights), middle + 1).scatter_(1, positions, 0.0)[:, :middle]
    return Shares(beside, positions, chosen, spread(of_rest, numbers, left)[None], torch.zeros_like(beside))


@cache
def _numbers_centroids(kind: type[Selector]) -> bool:
    """Whether selectors of a kind do; asked once, because Python looks through all of a protocol each time."""
    return issubclass(kind, NumbersCentroids)


def dense_shares(own: Shares, dense: torch.Tensor) -> Shares:
    """The weights that dense attention gives: of a token that was not chosen the smaller of its weight and of what
    centroids give it is stood for, what is above that is missed.

    Args:
        own: of the step.
        dense: [Hk, M], mean over the query heads.
    """
    padded = torch.nn.functional.pad(dense, (0, 1))
    left = padded.scatter(1, own.positions, 0.0)[:, :-1]
    stood_for = torch.minimum(left, own.others[0])
    others = torch.stack([stood_for, left - stood_for])
    return Shares(
        1 - dense.sum(-1), own.positions, padded.gather(1, own.positions), others, torch.zeros_like(own.nowhere)
    )


def spread(weights: torch.Tensor, numbers: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """[Hk, M]: the weights [Hk, C] of centroids, each spread evenly over its tokens.

    Args:
        numbers: [Hk, M] int64, the centroid of each token.
        left: [Hk, M], 1 where a centroid represents it, else 0.
    """
    counts = torch.zeros_like(weights).scatter_add_(1, numbers, left)
    return (weights / counts.clamp(min=1)).gather(1, numbers) * left
