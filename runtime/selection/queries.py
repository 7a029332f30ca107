"""The input of `Selector.select`: one layer's queries."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparsekv.kernels.tables.types import ExactKeys


@dataclass(frozen=True)
class InPlace:
    """Asks for a selection for one query that kernels on the same device will attend to in place.

    counter: [Hk] int64, to which selection kernels may add counts that only the device knows. exact: the keys that are
    always attended.
    """

    counter: torch.Tensor
    exact: ExactKeys


_PIECES = 2**20  # more than sequences that are decoded together


def piece_batch(start: int) -> int:
    """What is added to the batch of a question for its piece that begins with query `start`: layers attend to all
    pieces one after another, so that each needs a ranking of its own."""
    return (start + 1) * _PIECES


def is_piece(batch: int) -> bool:
    """Whether a batch is that of a question's piece."""
    return batch >= _PIECES


@dataclass(frozen=True)
class Queries:
    """query [Hk, G, Q, D], after RoPE.

    `positions()` [Q] int64 are the queries' positions in the sequence; `exact_logsumexp()` [Hk, G, Q] is the
    log-sum-exp of their logits on the rows that are always attended (sinks, tail, new tokens), and of learned sinks
    (GPT-OSS). Both are computed only when a method calls them. `joint`: one selection for all Q queries together, as in
    a question's prefill. `batch` is a number for these tokens, the same in every layer, by which layers find a ranking
    they share (0 in decoding; see `piece_batch`).
    """

    query: torch.Tensor
    positions: Callable[[], torch.Tensor]
    exact_logsumexp: Callable[[], torch.Tensor]
    joint: bool
    batch: int = 0
    in_place: InPlace | None = None

    def to(self, device: torch.device) -> "Queries":
        """The same on another device; itself if it is already there. Drops `in_place` when it moves."""
        if self.query.device == device:
            return self
        positions, exact = self.positions, self.exact_logsumexp
        moved = self.query.to(device)
        return Queries(moved, lambda: positions().to(device), lambda: exact().to(device), self.joint, self.batch)
