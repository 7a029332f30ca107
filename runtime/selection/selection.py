"""The result of a selector: rows to attend to, centroids of the others, and the cost of the selection."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparsekv.kernels.attention.types import ScoredCentroids
from sparsekv.kernels.common.runs import expand_full_runs, expand_runs


@dataclass(frozen=True)
class RowIndices:
    """Row indices that a kernel has written: rows [Hk, capacity] int32, of which the first used [Hk] int32 are valid.

    `queue` [Hk] int32 zeros, if there is one, is a work counter for the attention kernel.
    """

    rows: torch.Tensor
    used: torch.Tensor
    queue: torch.Tensor | None


@dataclass(frozen=True)
class RowSet:
    """Rows of the middle, as runs of consecutive rows in the selector's layout: starts, run_lengths [Hk, Q or 1, R].

    run_lengths: None where every run is one row. `capacity` is an upper bound of the rows of any one query. `total`:
    how many rows each query has, where the host knows it without a sync; 0 where kernels count them. `indices`: the
    same rows as plain indices, for one query or several that share them. log_weights [Hk, G, Q or 1, capacity] float32:
    added to the logits of rows that were sampled instead of ranked, in the order of the runs.
    """

    starts: torch.Tensor
    run_lengths: torch.Tensor | None
    capacity: int
    total: int | None = None
    indices: RowIndices | None = None
    log_weights: torch.Tensor | None = None

    def has_all(self, used: int) -> bool:
        """Whether it is one run of all `used` rows, for one query or several that share them."""
        return self.starts.shape[1:] == (1, 1) and self.total == used and self.run_lengths is not None

    @property
    def lengths(self) -> torch.Tensor:
        """[Hk, Q or 1, R]."""
        return torch.ones_like(self.starts) if self.run_lengths is None else self.run_lengths

    def counts(self) -> torch.Tensor | int:
        """Number of rows of each query [Hk, Q or 1], or `total` where it is known."""
        return self.lengths.sum(-1) if self.total is None else self.total

    def expand(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Row indices [Hk, Q or 1, capacity] int64, and which of them count, bool; None: all."""
        if self.run_lengths is None:
            return self.starts.long(), None
        if self.total == self.capacity and not self.starts.is_cuda:
            return expand_full_runs(self.starts, self.run_lengths, self.capacity), None
        return expand_runs(self.starts, self.run_lengths, self.capacity)


def single_rows(rows: torch.Tensor, log_weights: torch.Tensor | None = None) -> RowSet:
    """A row set of single rows [Hk, Q or 1, K]."""
    return RowSet(rows, None, rows.shape[-1], rows.shape[-1], log_weights=log_weights)


@dataclass(frozen=True)
class CentroidSegment:
    """Centroids that represent tokens which are not attended one by one: keys, values [Hk, C, D].

    log_counts [Hk, Q or 1, C] float32: the logarithm of the number of tokens that each represents. `scored`: the same
    with the logits of one decode step's query on the keys, where the selection has computed them already. `clusters`
    [Hk, C]: the number of each one's cluster; None: they are all clusters of a level, in order.
    """

    keys: torch.Tensor
    log_counts: torch.Tensor
    values: torch.Tensor
    scored: ScoredCentroids | None = None
    clusters: torch.Tensor | None = None

    def to(self, device: torch.device) -> "CentroidSegment":
        """The same on another device."""
        if self.keys.device == device:
            return self
        clusters = None if self.clusters is None else self.clusters.to(device)
        moved = self.keys.to(device), self.log_counts.to(device), self.values.to(device)
        return CentroidSegment(*moved, clusters=clusters)


@dataclass(frozen=True)
class Rest:
    """The tokens that were not chosen: each is represented by one centroid of `segments()`.

    attended: the centroids are attended instead of their tokens (Multipole Attention, equation 2); otherwise they only
    serve to estimate the missed attention. `in_place`: the same with logits, for kernels that attend in place.
    index_rows: D-sized rows read for the centroids beside those that scoring has read.
    """

    segments: Callable[[], tuple[CentroidSegment, ...]]
    attended: bool
    in_place: tuple[ScoredCentroids, ...] | None = None
    index_rows: float = 0.0


@dataclass(frozen=True)
class Cost:
    """D-sized index rows that were read per KV head to make a selection: a number, or [Hk, Q or 1].

    per_count: rows to add for each count in the counter that kernels were given, where they counted what was read.
    """

    index_rows: torch.Tensor | float
    per_count: int = 0


@dataclass(frozen=True)
class Selection:
    """Rows to attend to, the cost of selecting them, and centroids of the rest; None: there are none."""

    rows: RowSet
    cost: Cost
    rest: Rest | None = None

    def rows_read(self) -> torch.Tensor | float:
        """D-sized rows read per KV head: chosen keys and values, and the index; [Hk, Q or 1] or a number."""
        # Numbers stay Python numbers: copying one to the GPU as a tensor would wait for the GPU's pending work.
        return 2 * self.rows.counts() + self.cost.index_rows

    def attended_segments(self) -> tuple[CentroidSegment, ...]:
        """The centroids that are attended for the tokens that were not chosen."""
        return self.rest.segments() if self.rest is not None and self.rest.attended else ()
