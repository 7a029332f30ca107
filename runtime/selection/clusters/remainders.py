"""Clusters of each level that were scored, and their centroids for the tokens that are not chosen."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from sparsekv.runtime.selection.selection import CentroidSegment


@dataclass(frozen=True)
class Scored:
    """Clusters of one level that were scored: numbers, scores and token counts [Hk, Q or 1, S]; `read` is how many."""

    level: int
    clusters: torch.Tensor
    scores: torch.Tensor
    counts: torch.Tensor
    read: torch.Tensor | float


@dataclass(frozen=True)
class Centroids:
    """Each level's centroids [Hk, C, D], as they are attended; counts and parents [Hk, C] of clusters, parents of all
    levels but the coarsest. Without value centroids the keys are passed in their place, unread."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    counts: tuple[torch.Tensor, ...]
    parents: tuple[torch.Tensor, ...]

    def remainders(self, scored: list[Scored], taken: torch.Tensor) -> tuple[CentroidSegment, ...]:
        """For the tokens not chosen, by how many of each finest cluster are: each token is represented by the finest of
        its clusters scored."""
        parts = []
        for above, below in pairwise(scored):
            handed = above.scores.new_zeros(*above.scores.shape[:2], self.counts[above.level].shape[1])
            handed.scatter_add_(-1, of_clusters(self.parents[below.level], below.clusters), below.counts.to(handed))
            # An unused slot has the number of cluster 0 and a count of 0, so the difference may be negative.
            left = (above.counts - handed.gather(-1, above.clusters)).clamp(min=0)
            parts.append(self._remainder(above, left))
        return (*parts, self._remainder(scored[-1], scored[-1].counts - taken))

    def _remainder(self, scored: Scored, left: torch.Tensor) -> CentroidSegment:
        """Scored centroids, each representing `left` [Hk, Q or 1, S] of its tokens; gathered for a joint selection."""
        keys = self.keys[scored.level]
        values = self.values[scored.level] if self.values else keys
        if scored.clusters.shape[2] == keys.shape[1]:
            everything = torch.zeros_like(left).scatter_add_(-1, scored.clusters, left)
            return CentroidSegment(keys, everything.float().log(), values)
        if scored.clusters.shape[1] == 1:
            rows = scored.clusters[:, 0, :, None].expand(-1, -1, keys.shape[2])
            return CentroidSegment(keys.gather(1, rows), left.float().log(), values.gather(1, rows))
        spread = left.new_zeros(*left.shape[:2], keys.shape[1]).scatter_add_(-1, scored.clusters, left)
        return CentroidSegment(keys, spread.float().log(), values)


def of_clusters(values: torch.Tensor, clusters: torch.Tensor) -> torch.Tensor:
    """Entries of values [Hk, C] for clusters [Hk, Q or 1, S]."""
    return values[:, None].expand(-1, clusters.shape[1], -1).gather(-1, clusters)
