"""k-means over the heads of a layer: faiss on the CPU, batched torch on a GPU; one seed, one final assignment."""

import faiss
import torch

ROWS_AT_ONCE = 16_384
SPACES = ("normalised", "raw", "centred")


def to_space(keys: torch.Tensor, space: str) -> torch.Tensor:
    """Keys [Hk, M, D] as k-means sees them, in float32: unit vectors, as they are, or unit after centring.

    `normalised` is Squeezed Attention, section 3.1; `centred` subtracts each head's mean key first (RetroInfer).
    """
    keys = keys.float()
    if space == "raw":
        return keys
    if space == "centred":
        keys = keys - keys.mean(1, keepdim=True)
    return torch.nn.functional.normalize(keys, dim=-1)


def kmeans(
    points: torch.Tensor, clusters: int, iterations: int, seed: int, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Labels of a k-means per head, all from one final assignment to the final centres.

    Args:
        points: [Hk, M, D] float32.
        clusters: number of clusters, at most the number of valid points of any head.
        valid: [Hk, M] bool; points that take no part get label 0. None: all do.

    Returns:
        [Hk, M] int64. Clusters may be empty. On a GPU only the order of summation differs between runs.
    """
    if valid is None:
        valid = torch.ones(points.shape[:2], dtype=torch.bool, device=points.device)
    if points.is_cuda:
        return _kmeans_torch(points, clusters, iterations, seed, valid)
    labels = torch.zeros(points.shape[:2], dtype=torch.int64)
    for head, mask in enumerate(valid):
        labels[head, mask] = _kmeans_faiss(points[head, mask], clusters, iterations, seed)
    return labels


def _kmeans_faiss(points: torch.Tensor, clusters: int, iterations: int, seed: int) -> torch.Tensor:
    # The two bounds keep faiss from subsampling, and from printing its advice past Python to a person's screen.
    data = points.contiguous().numpy()
    trained = faiss.Kmeans(
        data.shape[1],
        clusters,
        niter=iterations,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=len(data),
    )
    trained.train(data)
    return torch.from_numpy(trained.assign(data)[1])


def _kmeans_torch(points: torch.Tensor, clusters: int, iterations: int, seed: int, valid: torch.Tensor) -> torch.Tensor:
    """Batched over heads; allocates [Hk, 16384, C] scores at a time beside the centres."""
    generator = torch.Generator(points.device).manual_seed(seed)
    order = torch.rand(valid.shape, generator=generator, device=points.device).masked_fill(~valid, 2.0).argsort(dim=-1)
    first = order[:, :clusters, None].expand(-1, -1, points.shape[-1])
    centres = points.gather(1, first)
    for _ in range(iterations):
        labels = _assign(points, centres)
        means, counts = cluster_means(points, labels, clusters, valid.float())
        centres = torch.where(counts[..., None] > 0, means, centres)
    return _assign(points, centres).masked_fill(~valid, 0)


def _assign(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
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
