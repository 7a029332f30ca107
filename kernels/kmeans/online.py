"""Appends tokens to a clustered block without clustering it from scratch (Multipole Attention, section 3.3)."""

import torch
from torch.nn.functional import pad

from sparsekv.kernels.kmeans.hierarchy import Level, level_sizes, levels_above
from sparsekv.kernels.kmeans.kmeans import assign, cluster_means, lloyd, random_kmeans, to_space

REFINEMENTS = 3  # full k-means iterations over the block after new tokens were assigned


def join_tokens(
    points: torch.Tensor, labels: torch.Tensor, clusters: int, all_clusters: int, generator: torch.Generator
) -> torch.Tensor:
    """Labels of a block after tokens were appended to it.

    Centres sampled from the new tokens are added, and replace empty ones; each new token is assigned to its nearest
    centre, which moves to the mean of its members (a step of sequential k-means); then a few iterations over the whole
    block follow.

    Args:
        points: [Hk, T, D] float32, the block's keys in the space they are clustered in, old tokens first.
        labels: [Hk, T_old] int64 of the old tokens.
        clusters: number of clusters of the old tokens; all_clusters: number to end with, at least as many.
        generator: draws the samples, on the points' device.

    Returns:
        [Hk, T] int64. Allocates the centres, and on a CPU [Hk, 16384, C] scores at a time.
    """
    return join_in_order(points, labels, clusters, all_clusters, sampling_order(points, labels, generator))


def sampling_order(points: torch.Tensor, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random order [Hk, T_new] int64 in which the new points of `join_tokens` become centres."""
    size = len(points), points.shape[1] - labels.shape[1]
    return torch.rand(size, generator=generator, device=points.device).argsort(dim=-1)


def join_in_order(
    points: torch.Tensor, labels: torch.Tensor, clusters: int, all_clusters: int, order: torch.Tensor
) -> torch.Tensor:
    """`join_tokens` with a given `sampling_order`. A CUDA graph can record it: no synchronisation, no data-dependent
    shapes."""
    old, new = points[:, : labels.shape[1]], points[:, labels.shape[1] :]
    more = all_clusters - clusters
    centres, counts = cluster_means(old, labels, clusters)
    centres, counts = pad(centres, (0, 0, 0, more)), pad(counts, (0, more))
    empty = counts == 0
    number = empty.cumsum(1) - 1
    sample = order.gather(1, number.clamp(0, order.shape[1] - 1))[..., None].expand_as(centres)
    sampled = empty & (number < order.shape[1])
    centres = torch.where(sampled[..., None], new.gather(1, sample), centres)
    means, joined = cluster_means(new, assign(new, centres), centres.shape[1])
    moved = (centres * counts[..., None] + means * joined[..., None]) / (counts + joined).clamp(min=1)[..., None]
    centres = torch.where(joined[..., None] > 0, moved, centres)
    return lloyd(points, centres, REFINEMENTS)[0]


def online_levels(
    keys: torch.Tensor,
    labels: torch.Tensor,
    clusters: int,
    shares: tuple[float, ...],
    space: str,
    iterations: int,
    generator: torch.Generator,
) -> list[Level]:
    """All levels of a block with keys [Hk, T, D], from the labels [Hk, T] of the finest, which has so many clusters;
    coarse levels are clustered from scratch."""

    def cluster(points: torch.Tensor, clusters: int, valid: torch.Tensor) -> torch.Tensor:
        return random_kmeans(to_space(points, space, valid), clusters, iterations, generator, valid)

    return levels_above(keys, labels, [clusters, *level_sizes(shares, keys.shape[1])[1:]], cluster)
