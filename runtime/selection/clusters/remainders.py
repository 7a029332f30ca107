"""Clusters of each level that were scored, and their centroids for the tokens that are not chosen."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
class LevelCentroids:
    """Each level's centroids [Hk, C, D], as they are attended; counts and parents [Hk, C] of clusters, parents of all
    levels but the coarsest. Without value centroids the keys are passed in their place, unread. layout [Hk, M]: the
    position of each row; starts [Hk, C]: the first row of each finest cluster."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    counts: tuple[torch.Tensor, ...]
    parents: tuple[torch.Tensor, ...]
    layout: torch.Tensor
    starts: torch.Tensor

    @cached_property
    def labels(self) -> torch.Tensor:
        """[Hk, M] int64: the finest cluster of each token, in order of position."""
        rows = torch.arange(self.layout.shape[1], device=self.layout.device).expand_as(self.layout).contiguous()
        cluster = torch.searchsorted(self.starts, rows, right=True) - 1
        return torch.zeros_like(cluster).scatter_(1, self.layout, cluster)

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

    def of_tokens(self, rest: Sequence[CentroidSegment]) -> torch.Tensor:
        """[Hk, M] int64, in order of position: which centroid represents each token, counted through the segments of
        `remainders`, the coarsest level's first; anything for tokens that were chosen."""
        if len(rest) == 1:
            return self.labels
        numbers, before = _own_numbers(rest[0], self.counts[len(rest) - 1]), rest[0].keys.shape[1]
        for level, part in zip(range(len(rest) - 2, -1, -1), rest[1:], strict=True):
            own = _own_numbers(part, self.counts[level])
            numbers = torch.where(own < 0, numbers.gather(1, self.parents[level].long()), own + before)
            before += part.keys.shape[1]
        return numbers.clamp(min=0).gather(1, self.labels)

    def _remainder(self, scored: Scored, left: torch.Tensor) -> CentroidSegment:
        """Scored centroids, each representing `left` [Hk, Q or 1, S] of its tokens; gathered for a joint selection."""
        keys = self.keys[scored.level]
        values = self.values[scored.level] if self.values else keys
        if scored.clusters.shape[2] == keys.shape[1]:
            everything = torch.zeros_like(left).scatter_add_(-1, scored.clusters, left)
            return CentroidSegment(keys, everything.float().log(), values)
        if scored.clusters.shape[1] == 1:
            clusters = scored.clusters[:, 0]
            rows = clusters[..., None].expand(-1, -1, keys.shape[2])
            picked = keys.gather(1, rows), left.float().log(), values.gather(1, rows)
            return CentroidSegment(*picked, clusters=clusters)
        spread = left.new_zeros(*left.shape[:2], keys.shape[1]).scatter_add_(-1, scored.clusters, left)
        return CentroidSegment(keys, spread.float().log(), values)


def _own_numbers(part: CentroidSegment, counts: torch.Tensor) -> torch.Tensor:
    """[Hk, C]: the place in a segment of each cluster of its level; -1 for those that represent no token there."""
    places = torch.arange(part.keys.shape[1], device=counts.device).expand(len(counts), -1)
    used = places.where(part.log_counts[:, 0] > -torch.inf, -1)
    if part.clusters is None:
        return used
    # An unused slot has the number of cluster 0.
    nowhere = torch.full_like(counts, -1, dtype=torch.int64)
    return nowhere.scatter_reduce_(1, part.clusters.long(), used, "amax")


def of_clusters(values: torch.Tensor, clusters: torch.Tensor) -> torch.Tensor:
    """Entries of values [Hk, C] for clusters [Hk, Q or 1, S]."""
    return values[:, None].expand(-1, clusters.shape[1], -1).gather(-1, clusters)
