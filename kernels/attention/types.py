"""Input types of the attention of one decode step: chosen rows, and centroids with their logits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sparsekv.kernels.common.rows import Int8Kernel, RowScales


@dataclass(frozen=True)
class RunRows:
    """Chosen rows of keys and values [H, M, D], given as runs of neighbouring rows or as single rows.

    On a GPU, keys and values have equal strides. For runs, `starts` [H, R] int holds their first rows. `ends` [H, R]
    int32 holds the running sums of their lengths, which are at most `capacity`. For single rows, `starts` holds the row
    indices and `ends` is None. The first `used` [H] int32 indices are valid, or the first `capacity` if `used` is None.

    `queue` [H] int32 is a counter for the GPU kernel, zero before the call and new for each call. Programs that finish
    their share of a head's rows early take further rows of the head, and add them to the counter. If `queue` is None,
    all rows are in fixed shares. With `scales`, keys and values are int8, and the scales convert them to real values.
    """

    keys: torch.Tensor
    values: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor | None
    capacity: int
    used: torch.Tensor | None = None
    queue: torch.Tensor | None = None
    scales: RowScales | None = None

    def gathered(self, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the keys and values [H, R, D] of rows [H, R] int64; int8 rows are dequantised to `dtype`."""
        places = rows[..., None].expand(-1, -1, self.keys.shape[2])
        keys, values = self.keys.gather(1, places), self.values.gather(1, places)
        if self.scales is None:
            return keys, values
        of_rows = self.scales.rows.gather(1, rows[..., None].expand(-1, -1, 2))
        return Int8Kernel(keys, values, replace(self.scales, rows=of_rows)).restored(dtype)


@dataclass(frozen=True)
class Centroids:
    """Centroids that are attended instead of the rows that they represent.

    Keys and values [H, C, D] have any float dtype. `log_counts` [H, C or more] float32 is the log of the number of
    rows that each centroid represents.
    """

    keys: torch.Tensor
    values: torch.Tensor
    log_counts: torch.Tensor


@dataclass(frozen=True)
class TakenRows:
    """Row counts of C clusters of each of H heads, some of whose rows are attended individually.

    `counts` [H, C] int32 counts all rows of each cluster; the counts of one head are contiguous. `taken` [H, C] int32
    counts the rows that are attended individually, and is contiguous.
    """

    counts: torch.Tensor
    taken: torch.Tensor

    def log_left(self) -> torch.Tensor:
        """Compute the log [H, C] of the number of remaining rows; minus infinity if none remain."""
        return (self.counts - self.taken).log()


@dataclass(frozen=True)
class ScoredCentroids:
    """Centroids that are attended instead of the rows that they represent, with the query's logits.

    `logits` [H, G, C or more] float32 are the query's products with the centroids' keys, scaled and soft-capped.
    `log_counts` is [H, C or more] float32 and `values` is [H, C, D]. The softmax is taken of logits + log_counts.
    Logits and log counts past the last value are minus infinity.

    Usually `log_counts` is the log of the number of rows that each centroid represents. On a CPU the logits may already
    include the log of the cluster size. Then `log_counts` is the log of the share of the cluster's rows that are not
    attended individually.

    With `rows` [H, C] int32, `values` [H, V, D] holds the values of V clusters, and `rows` are indices into it. The
    first `used` [H] int32 of them are attended, or all if `used` is None.

    `scales` and `clusters` are None if there are `rows`. With `scales`, the values are int8, and the scales convert
    them to real values. With `clusters`, the attention kernel adds a further term to logits + log_counts: the log of
    the number of the cluster's rows that are not attended individually.
    """

    logits: torch.Tensor
    log_counts: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor | None = None
    used: torch.Tensor | None = None
    scales: RowScales | None = None
    clusters: TakenRows | None = None

    def valid(self) -> torch.Tensor | None:
        """Return a mask [H, C] bool of the valid `rows`; None if all centroids are valid."""
        if self.rows is None or self.used is None:
            return None
        return torch.arange(self.rows.shape[1], device=self.rows.device) < self.used[:, None]

    def log_weights(self) -> torch.Tensor:
        """Return the log weights [H, C or more] that are added to the logits."""
        return self.log_counts if self.clusters is None else self.clusters.log_left() + self.log_counts

    def weighted_logits(self) -> torch.Tensor:
        """Return logits + log weights [H, G, C]; minus infinity for centroids that are not `valid`."""
        C, valid = (self.values if self.rows is None else self.rows).shape[1], self.valid()
        logits = self.logits[..., :C] + self.log_weights()[:, None, :C]
        return logits if valid is None else logits.masked_fill(~valid[:, None], -torch.inf)

    def gathered(self) -> torch.Tensor:
        """Return the value of each centroid [H, C, D]; copies the values if there are `rows` or `scales`.

        The value of a centroid that is not `valid` is that of the first cluster.
        """
        if self.scales is not None:
            return self.values.float() * self.scales.rows[..., 1:].float()
        if self.rows is None:
            return self.values
        valid = self.valid()
        rows = self.rows if valid is None else torch.where(valid, self.rows, 0)
        return self.values.gather(1, rows.long()[..., None].expand(-1, -1, self.values.shape[2]))


def one_level(parts: Sequence[ScoredCentroids]) -> ScoredCentroids | None:
    """Concatenate the centroids of several levels of a hierarchy; return None for no levels.

    With more than one level, the tensors are copied, and no level may have `rows`, `scales` or `clusters`.
    """
    if len(parts) < 2:
        return parts[0] if parts else None
    assert all(part.rows is None and part.scales is None and part.clusters is None for part in parts)
    sizes = [part.values.shape[1] for part in parts]
    return ScoredCentroids(
        torch.cat([part.logits[..., :size] for part, size in zip(parts, sizes, strict=True)], -1),
        torch.cat([part.log_counts[:, :size] for part, size in zip(parts, sizes, strict=True)], -1),
        torch.cat([part.values for part in parts], 1),
    )
