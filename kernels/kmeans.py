"""k-means of the keys of all heads at once: assignment, means, and iterations of both."""

import torch

ROWS_AT_ONCE = 16_384


def assign(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Nearest centre of each point by Euclidean distance.

    Args:
        points: [Hk, M, D]; centres: [Hk, C, D].

    Returns:
        [Hk, M] int64. Allocates [Hk, 16384, C] scores at a time.
    """
    half_norms = centres.square().sum(-1)[:, None] / 2
    return torch.cat(
        [(rows @ centres.transpose(1, 2) - half_norms).argmax(-1) for rows in points.split(ROWS_AT_ONCE, 1)], 1
    )


def cluster_means(
    points: torch.Tensor, labels: torch.Tensor, clusters: int, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean and weight of each cluster.

    Args:
        points: [Hk, M, D]; labels: [Hk, M]; weights: [Hk, M], ones when None.

    Returns:
        means [Hk, C, D] float32 (zeros for an empty cluster) and weights [Hk, C] float32.
    """
    weights = points.new_ones(labels.shape, dtype=torch.float32) if weights is None else weights.float()
    total = torch.zeros(len(points), clusters, device=points.device).scatter_add_(1, labels, weights)
    sums = torch.zeros(len(points), clusters, points.shape[-1], device=points.device)
    rows = labels[..., None].expand_as(points)
    sums.scatter_add_(1, rows, points.float() * weights[..., None])
    return sums / total.clamp(min=1)[..., None], total


def lloyd(
    points: torch.Tensor, centres: torch.Tensor, iterations: int, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Iterations of assignment and means; a centre that no point is nearest to stays where it is.

    Args:
        points: [Hk, M, D] float32; centres: [Hk, C, D], where to begin.
        weights: [Hk, M] float32, 0 for a point that takes no part.

    Returns:
        labels [Hk, M] of one last assignment, and the centres [Hk, C, D] that it was made to.
    """
    for _ in range(iterations):
        means, counts = cluster_means(points, assign(points, centres), centres.shape[1], weights)
        centres = torch.where(counts[..., None] > 0, means, centres)
    return assign(points, centres), centres
