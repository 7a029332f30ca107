"""k-means of the keys of all heads at once: assignment, means, and iterations of both."""

import torch

ROWS_AT_ONCE = 16_384
SPACES = ("normalised", "raw", "centred")


def to_space(keys: torch.Tensor, space: str, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Keys [Hk, M, D] as k-means sees them, in float32: unit vectors, as they are, or unit after centring.

    `normalised` is Squeezed Attention, section 3.1; `centred` subtracts each head's mean key first (RetroInfer).

    Args:
        valid: [Hk, M] bool, at least one a head; other keys take no part in the mean. None: all do.
    """
    keys = keys.float()
    if space == "raw":
        return keys
    if space == "centred":
        weights = keys.new_ones(keys.shape[:2]) if valid is None else valid.float()
        keys = keys - ((weights[:, None] @ keys) / weights.sum(1)[:, None, None])
    return torch.nn.functional.normalize(keys, dim=-1)


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


def random_kmeans(
    points: torch.Tensor,
    clusters: int,
    iterations: int,
    generator: torch.Generator,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Labels of a k-means that starts from random points of each head.

    Args:
        points: [Hk, M, D] float32.
        clusters: at most the number of valid points of any head.
        generator: chooses them, on the points' device.
        valid: [Hk, M] bool; points that take no part get label 0. None: all do.

    Returns:
        [Hk, M] int64.
    """
    random = torch.rand(points.shape[:2], generator=generator, device=points.device)
    random = random if valid is None else random.masked_fill(~valid, 2.0)
    first = random.argsort(dim=-1)[:, :clusters, None].expand(-1, -1, points.shape[-1])
    labels, _ = lloyd(points, points.gather(1, first), iterations, None if valid is None else valid.float())
    return labels if valid is None else labels.masked_fill(~valid, 0)
