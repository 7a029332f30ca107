"""Centroids of a method's finest clusters in 8 bits, as an index stores them whose keys and values are in 8 bits.

Their form is that of `int8_rows`: a centroid of keys and one of values are a row each, and those of a layer share
channels of their own. Coarser levels, of which there are few, stay in the index's dtype.
"""

from collections.abc import Mapping

import torch

from sparsekv.formats.int8_rows import quantise, restore

Tensors = Mapping[str, torch.Tensor]
FORM = "int8 of finest centroids"
"""What the tensors mean, in the recipe of their files: no build reuses files of an earlier form."""
KEYS, VALUES = "level0.centroids", "level0.value_centroids"
NAMES = {
    "keys": KEYS,
    "values": VALUES,
    "key_scales": "level0.centroid_scales",
    "value_scales": "level0.value_centroid_scales",
    "channel_scales": "level0.centroid_channel_scales",
    "channel_offsets": "level0.centroid_channel_offsets",
}
"""Names of a method's tensors, by those of `int8_rows`."""
FEWEST_SHARED = 32  # channels of fewer centroids fit others badly
SCALES = frozenset(NAMES.values()) - {KEYS, VALUES}


def with_centroids_in_8_bits(tensors: Tensors, before: Tensors | None = None) -> dict[str, torch.Tensor]:
    """A method's tensors of one layer with its finest clusters' centroids in 8 bits; all of them if it has no clusters.

    Args:
        tensors: as an indexer builds them.
        before: what is stored of the clusters that these continue. Its channels are used again, so that centroids that
            stay get the numbers that they had. Not if it has fewer than FEWEST_SHARED clusters, or than half as many as
            there are now: channels of a few do not fit the others.
    """
    if KEYS not in tensors:
        return dict(tensors)
    keys, values = tensors[KEYS], tensors.get(VALUES)
    old = None if before is None else numbers_of(before)
    if old is not None and old["keys"].shape[1] < max(FEWEST_SHARED, keys.shape[1] / 2):
        old = None
    rounded = quantise(_without_empty(keys, tensors["level0.counts"]), keys if values is None else values, old)
    taken = {NAMES[name]: tensor for name, tensor in rounded.items() if values is not None or "value" not in name}
    return {**tensors, **taken}


def numbers_of(tensors: Tensors) -> dict[str, torch.Tensor] | None:
    """The centroids' tensors of 8 bits by the names of `int8_rows`, without those of values if the method has none;
    None where centroids are not in 8 bits."""
    if NAMES["key_scales"] not in tensors:
        return None
    return {name: tensors[stored] for name, stored in NAMES.items() if stored in tensors}


def with_restored_centroids(tensors: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A method's tensors of one layer as an indexer builds them, with the centroids in a dtype that 8 bits mean; all as
    they are where centroids are not in 8 bits. Allocates the centroids."""
    numbers = numbers_of(tensors)
    if numbers is None:
        return dict(tensors)
    channels = numbers["channel_scales"], numbers["channel_offsets"]
    found = {name: tensor for name, tensor in tensors.items() if name not in SCALES}
    found[KEYS] = restore(numbers["keys"], numbers["key_scales"], channels, dtype)
    if "values" in numbers:
        found[VALUES] = restore(numbers["values"], numbers["value_scales"], None, dtype)
    return found


def _without_empty(keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Centroids [Hk, C, D] with the mean in the place of those of empty clusters: zeros, which nobody reads and which
    may be far outside of the range of channels."""
    filled = (counts > 0)[..., None]
    usual = (keys * filled).float().sum(1, keepdim=True) / filled.sum(1, keepdim=True).clamp(min=1)
    return torch.where(filled, keys, usual.to(keys.dtype))
