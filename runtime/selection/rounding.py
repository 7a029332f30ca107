"""Centroids in 8 bits, for an index whose keys and values are stored so."""

from dataclasses import dataclass

import torch

from sparsekv.formats.int8_rows import restore
from sparsekv.kernels.common.eight_bits import RowsOf8Bits
from sparsekv.runtime.cache.rows_in_8_bits import rounded


@dataclass(frozen=True)
class RoundedCentroids:
    """Centroids [Hk, C, D] as 8 bits hold them, and the numbers, which kernels of a GPU read."""

    keys: torch.Tensor
    values: torch.Tensor
    numbers: RowsOf8Bits


def round_centroids(keys: torch.Tensor, values: torch.Tensor, counts: torch.Tensor) -> RoundedCentroids:
    """Centroids [Hk, C, D] of clusters with counts [Hk, C] of tokens, rounded; allocates them anew, and their numbers.

    Empty clusters, whose centroids nobody reads, do not set the range of the channels that all of a head's share.
    """
    filled = (counts > 0)[..., None]
    usual = (keys * filled).float().sum(1, keepdim=True) / filled.sum(1, keepdim=True).clamp(min=1)
    numbers = rounded(torch.where(filled, keys, usual.to(keys.dtype)), values)
    of_keys, of_values = numbers.scales.rows.unbind(2)
    channels = numbers.scales.channels, numbers.scales.offsets
    return RoundedCentroids(
        restore(numbers.keys, of_keys, channels, keys.dtype),
        restore(numbers.values, of_values, None, values.dtype),
        numbers,
    )
