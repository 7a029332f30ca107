"""Shares of one step's attention: what falls on each token of the middle, and what is attended exactly."""

from dataclasses import dataclass

import torch

from sparsekv.runtime.attention.executors import Fetched
from sparsekv.runtime.attention.step import Step
from sparsekv.runtime.reporting.recall import chosen_positions
from sparsekv.runtime.selection.capabilities import NumbersCentroids
from sparsekv.runtime.selection.interface import Selector
from sparsekv.runtime.selection.selection import CentroidSegment, Selection


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

    exact [Hk]: of sinks, tail and new tokens; tokens [3, Hk, M]: of each token of the middle what was chosen, stood for
    and missed, in order of position; nowhere [Hk]: of centroids whose tokens are not known, which is stood for, too.
    """

    exact: torch.Tensor
    tokens: torch.Tensor
    nowhere: torch.Tensor

    def totals(self) -> torch.Tensor:
        """[4, Hk]: exact, chosen, stood for, missed."""
        chosen, stood_for, missed = self.tokens.sum(-1)
        return torch.stack([self.exact, chosen, stood_for + self.nowhere, missed])


def own_shares(one: AttendedStep, middle: int) -> Shares:
    """The weights that the step itself gives; a centroid's is spread evenly over the tokens that it represents, and
    nothing is missed."""
    rows, exact = one.fetched.keys.shape[1], one.step.exact.keys.shape[1]
    weights = one.weights[:, :, -1].mean(1)
    rest = sum(part.keys.shape[1] for part in _attended_rest(one))
    of_rows, beside, of_rest, of_sinks = weights.split([rows, exact, rest, weights.shape[1] - rows - exact - rest], 1)
    positions = chosen_positions(one.selection.rows, one.layout, middle)[:, -1].to(weights.device)
    chosen = weights.new_zeros(len(weights), middle + 1).scatter_add_(1, positions, of_rows)
    left = torch.ones_like(chosen).scatter_(1, positions, 0.0)[:, :middle]
    stood_for, nowhere = torch.zeros_like(left), of_rest.sum(1)
    if rest and isinstance(one.selector, NumbersCentroids):
        numbers = one.selector.centroid_of(one.fetched.rest).to(weights.device)
        stood_for, nowhere = spread(of_rest, numbers, left), torch.zeros_like(nowhere)
    tokens = torch.stack([chosen[:, :middle], stood_for, torch.zeros_like(left)])
    return Shares(beside.sum(1) + of_sinks.sum(1), tokens, nowhere)


def dense_shares(own: Shares, chosen: torch.Tensor, dense: torch.Tensor) -> Shares:
    """The weights that dense attention gives: of a token that was not chosen the smaller of its weight and of what
    centroids give it is stood for, what is above that is missed.

    Args:
        own: of the step.
        chosen: [Hk, M] bool.
        dense: [Hk, M], mean over the query heads.
    """
    left = dense.masked_fill(chosen, 0.0)
    stood_for = torch.minimum(left, own.tokens[1])
    tokens = torch.stack([dense - left, stood_for, left - stood_for])
    return Shares(1 - dense.sum(-1), tokens, torch.zeros_like(own.nowhere))


def spread(weights: torch.Tensor, numbers: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """[Hk, M]: the weights [Hk, C] of centroids, each spread evenly over its tokens.

    Args:
        numbers: [Hk, M] int64, the centroid of each token.
        left: [Hk, M], 1 where a centroid represents it, else 0.
    """
    counts = torch.zeros_like(weights).scatter_add_(1, numbers, left)
    return (weights / counts.clamp(min=1)).gather(1, numbers) * left


def _attended_rest(one: AttendedStep) -> tuple[CentroidSegment, ...]:
    return one.fetched.rest if one.fetched.rest_attended else ()
