"""The largest of some shares."""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

MOST_IN_RECORD, MOST_IN_MEAN = 16, 64
"""Passages that a record lists, and a mean."""
MOST_CHOSEN, MOST_MISSED = 8, 4
"""Tokens that a record lists."""


@dataclass(frozen=True)
class Largest:
    """The largest shares, the largest first: places [..., K] int64, of passages or of tokens of the middle, and their
    shares [1, ..., K], of passages what was chosen, stood for and missed [2 or 3, ..., K]."""

    places: torch.Tensor
    shares: torch.Tensor


def largest(shares: torch.Tensor, most: int, positions: torch.Tensor | None = None) -> Largest:
    """The `most` largest of shares [..., R], zeros where there are fewer; at positions [..., R], or by default as they
    are counted."""
    values, places = shares.topk(min(most, shares.shape[-1]))
    places = places if positions is None else positions.gather(-1, places)
    if (short := most - places.shape[-1]) > 0:
        values, places = pad(values, (0, short)), pad(places, (0, short))
    return Largest(places, values[None])


def largest_passages(shares: torch.Tensor, most: int) -> Largest:
    """The passages of the largest sums, from what was chosen, stood for and missed [2 or 3, ..., P] of each."""
    places = shares.sum(0).topk(min(most, shares.shape[-1])).indices
    return Largest(places, shares.gather(-1, places.expand(len(shares), *places.shape)))
