"""Product quantisation: a key's channels in parts, each part named by the nearest of at most 256 centroids."""

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.indexers.clustering import kmeans
from sparsekv.kernels.kmeans.kmeans import assign, cluster_means

CODES = 256  # centroids of a part: the values of a byte


def check_parts(option: str, parts: int, head_dim: int) -> None:
    """Raise UsageError unless a head's channels divide into so many parts."""
    if head_dim % parts:
        raise UsageError(f"{option} {parts}: the model's heads have {head_dim} channels; give a divisor of that")


def train_codebooks(keys: torch.Tensor, parts: int, iterations: int, seed: int) -> torch.Tensor:
    """Centroids [Hk, m, C, D / m] float16 of each part, by k-means over keys [Hk, M, D]; C is M if that is below 256.

    Allocates the keys once more in float32.
    """
    clusters = min(CODES, keys.shape[1])
    means = []
    for part in _parts(keys, parts):
        labels = kmeans(part, clusters, iterations, seed)
        means.append(cluster_means(part, labels, clusters)[0])
    return torch.stack(means, 1).half()


def encode(keys: torch.Tensor, codebooks: torch.Tensor) -> torch.Tensor:
    """Codes [Hk, M, m] uint8 of keys [Hk, M, D]: the nearest centroid of each part."""
    books = codebooks.float().unbind(1)
    nearest = [assign(part, book) for part, book in zip(_parts(keys, len(books)), books, strict=True)]
    return torch.stack(nearest, -1).to(torch.uint8)


def _parts(keys: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """m tensors [Hk, M, D / m] float32 of neighbouring channels."""
    return [part.contiguous() for part in keys.float().chunk(parts, -1)]
