"""What attention of one decode step reads: runs of rows, centroids with logits, and clusters to choose from."""

from dataclasses import dataclass

import torch

from sparsekv.kernels.clusters.best_clusters import CountedClusters


@dataclass(frozen=True)
class RunRows:
    """Rows of H heads to choose from, keys and values [H, M, D], and runs of them: starts [H, R] int, the first row of
    each, ends [H, R] int32, the running sum of their lengths, `capacity` at most; None: each is one row, and of those
    there are `used` [H] int32 of each head, None: all. `queue` [H] int32 zeros, which one call uses up: with it rows
    go to programs that are done before others."""

    keys: torch.Tensor
    values: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor | None
    capacity: int
    used: torch.Tensor | None = None
    queue: torch.Tensor | None = None


@dataclass(frozen=True)
class ScoredCentroids:
    """Centroids that are attended in the place of rows: logits [H, G, C] float32 of the query on their keys, as the
    softmax sees them; log_counts [H, C] float32, of how many rows each stands for; values [H, C, D]. There may be more
    logits and counts than values: those are minus infinity. With `rows` [H, C] int32 the values [H, V, D] are of all
    clusters, and these tell which of them each is; there are `used` [H] int32 of each head, None: all."""

    logits: torch.Tensor
    log_counts: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor | None = None
    used: torch.Tensor | None = None

    def gathered(self) -> torch.Tensor:
        """The value of each [H, C, D]; copies them where `rows` tells which they are."""
        if self.rows is None:
            return self.values
        return self.values.gather(1, self.rows.long()[..., None].expand(-1, -1, self.values.shape[2]))


@dataclass(frozen=True)
class StepTensors:
    """C clusters of each of H heads: their first rows, starts [H, C] int64; values [H, C, D] that may stand for tokens
    which are not chosen, None: there are none; and how logits are scaled."""

    counted: CountedClusters
    starts: torch.Tensor
    values: torch.Tensor | None
    softmax_scale: float
    softcap: float | None
