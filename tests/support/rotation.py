"""Rotary embeddings by their definition, and keys rotated by them."""

import torch

from sparsekv.formats.index.schema import RopeFacts

from .random_tensors import normal

ROPES = {
    "halves": RopeFacts(frequencies=[1.0, 0.1, 0.01], interleaved=False),
    "interleaved": RopeFacts(frequencies=[0.7, 0.02], interleaved=True),
    "none": RopeFacts(frequencies=[], interleaved=False),
}
"""RoPEs for heads of 6 channels or more, which rotate up to 6 channels, 4 channels, or none."""


def rotated(rows: torch.Tensor, positions: torch.Tensor, rope: RopeFacts) -> torch.Tensor:
    """Rotate rows [..., T, D] to positions [..., T], each pair of channels as a complex number; return float64."""
    result, pairs = rows.double().clone(), len(rope.frequencies)
    for number, frequency in enumerate(rope.frequencies):
        one, other = (2 * number, 2 * number + 1) if rope.interleaved else (number, number + pairs)
        angles = positions.double() * frequency
        product = torch.complex(result[..., one], result[..., other]) * torch.polar(torch.ones_like(angles), angles)
        result[..., one], result[..., other] = product.real, product.imag
    return result


def rotated_kinds(seed: int, labels: torch.Tensor, D: int, first: int, rope: RopeFacts) -> torch.Tensor:
    """Return [Hk, M, D] float32: the random key of each label [Hk, M], rotated to positions from `first` on."""
    kinds = normal(seed, len(labels), int(labels.max()) + 1, D)
    keys = kinds.gather(1, labels[..., None].expand(-1, -1, D))
    return rotated(keys, first + torch.arange(labels.shape[1]), rope).float()


def windowed_query(
    query: torch.Tensor, first: int, rope: RopeFacts | None, distance: int = 1024
) -> tuple[torch.Tensor, str]:
    """Return queries [Hk, G, Q, D] float64 as a lookup rotates them, and the name of the centroids that they are
    compared with.

    The queries' positions begin at `first`. Without `rope`, queries and centroids are those of attention itself.
    """
    if rope is None:
        return query.double(), "centroids"
    positions = first + torch.arange(query.shape[2])
    return rotated(query, distance - positions, rope), "lookup_centroids"
