"""Tokens far from their centroid, which say little about it and it about them, as clusters of their own."""

from collections.abc import Sequence

import torch

from sparsekv.kernels.kmeans.hierarchy import level_sizes
from sparsekv.kernels.kmeans.kmeans import cluster_means


def finest_size(levels: Sequence[float], outliers: float, tokens: int) -> int:
    """Number of clusters of the finest level, those of one outlier each included."""
    return level_sizes(levels, tokens)[0] + round(outliers * tokens)


def single_out(points: torch.Tensor, labels: torch.Tensor, clusters: int, share: float) -> tuple[torch.Tensor, int]:
    """Make the share of each head's points that is farthest from its centroids clusters of one, numbered last.

    Allocates the points once more in float32.

    Args:
        points: [Hk, M, D]; labels: [Hk, M] int64 in so many clusters.

    Returns:
        Labels [Hk, M] and the number of clusters. A cluster may be empty then.
    """
    singled = round(share * points.shape[1])
    if not singled:
        return labels, clusters
    centroids, _ = cluster_means(points, labels, clusters)
    away = centroids.gather(1, labels[..., None].expand_as(points)).sub_(points).square_().sum(-1)
    farthest = away.topk(singled, dim=1).indices
    own = torch.arange(clusters, clusters + singled, device=labels.device)
    return labels.scatter(1, farthest, own.expand_as(farthest)), clusters + singled
