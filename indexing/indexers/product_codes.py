"""Product quantisation: a key's channels in parts, each part named by the nearest of at most 256 centroids."""

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.kernels.kmeans.kmeans import assign, moved_centres, random_points

CODES = 256  # centroids of a part: the values of a byte


def check_parts(option: str, parts: int, head_dim: int) -> None:
    """Raise UsageError unless a head's channels divide into so many parts."""
    if head_dim % parts:
        raise UsageError(f"{option} {parts}: the model's heads have {head_dim} channels; give a divisor of that")


def train_codebooks(
    keys: torch.Tensor, parts: int, iterations: int, seed: int, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Centroids [Hk, m, C, D / m] float16 of each part, by k-means over keys [Hk, M, D]; C is M if that is below 256.

    All heads' parts move together, in one product. Allocates the keys once more in float32.

    Args:
        weights: [Hk, M], above 0: how much the error of each key matters. None: as much as any other's.
    """
    points = _parts(keys, parts)
    of_parts = None if weights is None else weights.repeat_interleave(parts, 0)
    generator = torch.Generator(points.device).manual_seed(seed)
    first = random_points(points, min(CODES, keys.shape[1]), generator, weights=of_parts)
    # k-means ends with labels; codes are labels of the rounded centroids, so that these can move once more instead.
    _, books = moved_centres(points, first, iterations + 1, of_parts)
    return books.view(len(keys), parts, -1, points.shape[2]).half()


def encode(keys: torch.Tensor, codebooks: torch.Tensor) -> torch.Tensor:
    """Codes [Hk, M, m] uint8 of keys [Hk, M, D]: the nearest centroid of each part."""
    Hk, parts = codebooks.shape[:2]
    nearest = assign(_parts(keys, parts), codebooks.float().flatten(0, 1))
    return nearest.view(Hk, parts, -1).transpose(1, 2).byte().contiguous()


def decode(codes: torch.Tensor, codebooks: torch.Tensor) -> torch.Tensor:
    """The keys [Hk, M, D] float32 that codes [Hk, M, m] stand for."""
    named = codes.transpose(1, 2).long()[..., None].expand(-1, -1, -1, codebooks.shape[3])
    return codebooks.float().gather(2, named).transpose(1, 2).flatten(2)


def _parts(keys: torch.Tensor, parts: int) -> torch.Tensor:
    """[Hk * m, M, D / m] float32: neighbouring channels of a head's keys, part by part."""
    Hk, M, D = keys.shape
    return keys.float().view(Hk, M, parts, D // parts).transpose(1, 2).flatten(0, 1)
