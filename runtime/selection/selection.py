"""What a selector answers: which rows to attend to, what stands for the others, and what choosing cost."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparsekv.kernels.attention.types import ScoredCentroids
from sparsekv.kernels.common.runs import expand_full_runs, expand_runs


@dataclass(frozen=True)
class RowIndices:
    """Row indices that a kernel has written out [Hk, capacity] int32, and how many there are [Hk] int32; `queue`, where
    there is one, are zeros [Hk] int32 for the attention to count in."""

    rows: torch.Tensor
    used: torch.Tensor
    queue: torch.Tensor | None


@dataclass(frozen=True)
class RowSet:
    """Rows of the middle, as runs of neighbours in the selector's layout: starts, run_lengths [Hk, Q or 1, R].

    run_lengths: None where every run is one row. `capacity` bounds the rows of any one query. `total`: how many rows
    each query has, where that is known without looking; 0 where kernels count them. `indices`: the same rows written
    out, for one query. log_weights [Hk, G, Q or 1, capacity] float32: for rows that were drawn and not ranked, added to
    their logits, in the order of the runs.
    """

    starts: torch.Tensor
    run_lengths: torch.Tensor | None
    capacity: int
    total: int | None = None
    indices: RowIndices | None = None
    log_weights: torch.Tensor | None = None

    @property
    def lengths(self) -> torch.Tensor:
        """[Hk, Q or 1, R]."""
        return torch.ones_like(self.starts) if self.run_lengths is None else self.run_lengths

    def counts(self) -> torch.Tensor | int:
        """Rows of each query [Hk, Q or 1], or a number where it is the same for all and known without looking."""
        return self.lengths.sum(-1) if self.total is None else self.total

    def expand(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Row indices [Hk, Q or 1, capacity] int64, and which of them count, bool; None: all."""
        if self.run_lengths is None:
            return self.starts.long(), None
        if self.total == self.capacity and not self.starts.is_cuda:
            return expand_full_runs(self.starts, self.run_lengths, self.capacity), None
        return expand_runs(self.starts, self.run_lengths, self.capacity)


def single_rows(rows: torch.Tensor, log_weights: torch.Tensor | None = None) -> RowSet:
    """Rows [Hk, Q or 1, K] that were chosen one by one."""
    return RowSet(rows, None, rows.shape[-1], rows.shape[-1], log_weights=log_weights)


@dataclass(frozen=True)
class CentroidSegment:
    """Centroids of tokens that are not attended one by one: keys, values [Hk, C, D].

    log_counts [Hk, Q or 1, C] float32: the logarithm of how many such tokens each has. `scored`: the same for one
    decode step, where choosing has found the query's logits on the keys already.
    """

    keys: torch.Tensor
    log_counts: torch.Tensor
    values: torch.Tensor
    scored: ScoredCentroids | None = None

    def to(self, device: torch.device) -> "CentroidSegment":
        """The same on another device."""
        if self.keys.device == device:
            return self
        return CentroidSegment(self.keys.to(device), self.log_counts.to(device), self.values.to(device))


@dataclass(frozen=True)
class Rest:
    """The tokens that were not chosen, each in one centroid of some `segments()`.

    attended: the centroids are attended in the place of their tokens (Multipole Attention, equation 2); else they only
    tell how much attention was left. `in_place`: for attention by kernels alone, the same with logits.
    """

    segments: Callable[[], tuple[CentroidSegment, ...]]
    attended: bool
    in_place: tuple[ScoredCentroids, ...] | None = None


@dataclass(frozen=True)
class Cost:
    """D-sized rows of each KV head that were read to choose, beside keys and values: a number, or [Hk, Q or 1].

    per_count: so many more for each that kernels added to the counter of the queries.
    """

    index_rows: torch.Tensor | float
    per_count: int = 0


@dataclass(frozen=True)
class Selection:
    """Rows to attend to, the cost of choosing them, and what is known of the rest; None: nothing."""

    rows: RowSet
    cost: Cost
    rest: Rest | None = None

    def rows_read(self) -> torch.Tensor | float:
        """D-sized rows read of each KV head: keys, values and what they were chosen by; [Hk, Q or 1] or a number."""
        # A number is added as one: made a tensor, its copy to a GPU would wait for all that the GPU has still to do.
        return 2 * self.rows.counts() + self.cost.index_rows

    def attended_segments(self) -> tuple[CentroidSegment, ...]:
        """The centroids that are attended in the place of what was not chosen."""
        return self.rest.segments() if self.rest is not None and self.rest.attended else ()
