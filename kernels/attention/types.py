"""Inputs of one decode step's attention: runs of rows, and centroids with logits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sparsekv.kernels.common.eight_bits import Int8Kernel, RowScales


@dataclass(frozen=True)
class RunRows:
    """Chosen rows of keys and values [H, M, D], as runs of neighbouring rows or as single rows.

    Runs: starts [H, R] int are their first rows, ends [H, R] int32 the running sums of their lengths, at most
    `capacity`. Single rows: starts are the rows, ends is None, and the first `used` [H] int32 are valid; None: all.
    queue [H] int32 zeros lets programs that finish early take more rows; one call uses it up. scales: keys and values
    are int8, and mean what these say.
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
        """Keys and values [H, R, D] of rows [H, R] int64; of numbers in 8 bits what they mean, in `dtype`."""
        places = rows[..., None].expand(-1, -1, self.keys.shape[2])
        keys, values = self.keys.gather(1, places), self.values.gather(1, places)
        if self.scales is None:
            return keys, values
        of_rows = self.scales.rows.gather(1, rows[..., None].expand(-1, -1, 2))
        return Int8Kernel(keys, values, replace(self.scales, rows=of_rows)).restored(dtype)


@dataclass(frozen=True)
class Centroids:
    """Centroids that are attended in place of the rows they represent: keys, values [H, C, D], of any float dtype, and
    log_counts [H, C or more] float32, the log of how many rows each represents."""

    keys: torch.Tensor
    values: torch.Tensor
    log_counts: torch.Tensor


@dataclass(frozen=True)
class TakenRows:
    """Clusters some of whose rows are attended themselves: counts [H, C] int32 of all of their rows, and taken [H, C]
    int32 of those; taken is contiguous, and so are a head's counts."""

    counts: torch.Tensor
    taken: torch.Tensor

    def log_left(self) -> torch.Tensor:
        """The log [H, C] of how many rows are left; minus infinity for none."""
        return (self.counts - self.taken).log()


@dataclass(frozen=True)
class ScoredCentroids:
    """Centroids that are attended in place of the rows they represent.

    logits [H, G, C] float32 of the query on their keys, scaled and soft-capped; log_counts [H, C] float32; values
    [H, C, D]. The softmax takes logits + log_counts. Mostly log_counts is the log of how many rows each represents;
    where the logits include the log of whole clusters, as on a CPU, it is the log of the share of them that is left.
    Logits and log counts past the last value are minus infinity. With rows [H, C] int32 the values [H, V, D] are those
    of all clusters, and `rows` are indices into them; the first `used` [H] int32 are valid, None: all. scales: values
    are int8, without `rows`, and mean what these say. clusters, without `rows`: what is left of them is not counted
    yet; the attention does, and the softmax takes the log of that, plus log_counts [H, C], plus the logits.
    """

    logits: torch.Tensor
    log_counts: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor | None = None
    used: torch.Tensor | None = None
    scales: RowScales | None = None
    clusters: TakenRows | None = None

    def log_weights(self) -> torch.Tensor:
        """Weights in the log domain that are added to the logits, [H, C]."""
        return self.log_counts if self.clusters is None else self.clusters.log_left() + self.log_counts

    def gathered(self) -> torch.Tensor:
        """Value of each centroid [H, C, D]; copies them if there are `rows` or scales."""
        if self.scales is not None:
            return self.values.float() * self.scales.rows[..., 1:].float()
        if self.rows is None:
            return self.values
        return self.values.gather(1, self.rows.long()[..., None].expand(-1, -1, self.values.shape[2]))


def one_level(parts: Sequence[ScoredCentroids]) -> ScoredCentroids | None:
    """Centroids of several levels as one, none in 8 bits; copies them if there is more than one level."""
    if len(parts) < 2:
        return parts[0] if parts else None
    assert all(part.scales is None and part.clusters is None for part in parts)
    sizes = [part.values.shape[1] for part in parts]
    return ScoredCentroids(
        torch.cat([part.logits[..., :size] for part, size in zip(parts, sizes, strict=True)], -1),
        torch.cat([part.log_counts[:, :size] for part, size in zip(parts, sizes, strict=True)], -1),
        torch.cat([part.values for part in parts], 1),
    )
