"""Queries of one layer that rows are to be chosen for."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparsekv.kernels.tables.types import ExactKeys


@dataclass(frozen=True)
class InPlace:
    """Asks for one query's choice whose rows kernels will attend to where they lie, on one device.

    counter: [Hk] int64, to which the choice may add what only the device knows; exact: the keys that are attended
    whatever is chosen.
    """

    counter: torch.Tensor
    exact: ExactKeys


@dataclass(frozen=True)
class Queries:
    """query [Hk, G, Q, D], after RoPE.

    `positions()` [Q] int64 are theirs in the sequence; `exact_logsumexp()` [Hk, G, Q] is the log-sum-exp of their
    logits on all that is attended exactly anyway (sinks, tail, new tokens). Both are computed when a method asks for
    them. `joint`: one choice for all Q queries together, as for a question's prefill. Every layer that is asked about
    the same tokens is asked with the same `batch`.
    """

    query: torch.Tensor
    positions: Callable[[], torch.Tensor]
    exact_logsumexp: Callable[[], torch.Tensor]
    joint: bool
    batch: int = 0
    in_place: InPlace | None = None

    def to(self, device: torch.device) -> "Queries":
        """The same on another device; itself where it is there already."""
        if self.query.device == device:
            return self
        positions, exact = self.positions, self.exact_logsumexp
        moved = self.query.to(device)
        return Queries(moved, lambda: positions().to(device), lambda: exact().to(device), self.joint, self.batch)
