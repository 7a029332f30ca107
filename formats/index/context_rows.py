"""Quantise and restore a layer's keys, values and centroids, which an index stores in the model's dtype or int8.

In shapes, Hk is the number of KV heads, N of the prompt's tokens, T of some tokens, and D of a head's channels.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

LARGEST = 127  # largest int8 value that is used: without -128, the range is symmetric
LARGEST_SCALE = 129 * 2.0**114  # largest bfloat16 scale whose product with LARGEST is finite in float32
PIECE = 8192  # tokens that are converted at a time, by way of float32
OF_TOKENS = ("keys", "values", "key_scales", "value_scales")
"""Names of the tensors [Hk, N, ...] with one row or one scale per token."""
OF_CHANNELS = ("channel_scales", "channel_offsets")
"""Names of the tensors [Hk, D] with one scale or offset per key channel."""
SCALES = ("key_scales", "value_scales", *OF_CHANNELS)
"""Names of the scales and offsets of `keys` and `values`. All are bfloat16: 2 bytes, with the range of float32."""
FORM = "int8 of tokens and channels"
"""Name of this int8 format. It is part of a file's recipe, so that no build reuses files of an earlier format."""

Tensors = Mapping[str, torch.Tensor]


def quantise(keys: torch.Tensor, values: torch.Tensor, like: Tensors | None = None) -> dict[str, torch.Tensor]:
    """Quantise keys and values [Hk, N, D], finite and of any floating dtype, to int8 on their device.

    A dequantised number differs from the original by at most half its scale, before `restore` rounds it to a dtype. A
    key's scale is the product of its token's and its channel's scale. Allocates the int8 result twice, and float32
    copies of PIECE tokens.

    Args:
        like: the result of an earlier call for the tokens before these. Its channel scales and offsets are used again.
            A key outside the range of these channels gets a larger token scale.

    Returns:
        keys, values [Hk, N, D] int8; key_scales, value_scales [Hk, N]; channel_scales, channel_offsets [Hk, D].
    """
    channels = _channels(keys) if like is None else {name: like[name].to(keys.device) for name in OF_CHANNELS}
    pieces = [
        _quantise_piece(*some, channels) for some in zip(keys.split(PIECE, 1), values.split(PIECE, 1), strict=True)
    ]
    return {name: torch.cat([piece[name] for piece in pieces], 1) for name in OF_TOKENS} | channels


def bounds(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors of an int8 file that must be finite, by name; empty for other files.

    Scales are returned multiplied by LARGEST. Kernels multiply int8 numbers by scales without a clamp, so the product
    of a scale and the largest number must be finite, too.
    """
    found = {name: tensors[name] for name in SCALES if name in tensors}
    return {name: rows if name == "channel_offsets" else rows * LARGEST for name, rows in found.items()}


def row_bytes(channels: int) -> int:
    """Return the bytes of one token's int8 key or value in one head, including its bfloat16 scale."""
    return channels + 2


def joined(first: Tensors, then: Tensors) -> dict[str, torch.Tensor]:
    """Concatenate two results of `quantise` along the tokens, on the second's device.

    The second result must have been made with `like=first`.
    """
    of_tokens = {name: torch.cat([first[name].to(then[name].device), then[name]], 1) for name in OF_TOKENS}
    return of_tokens | {name: first[name].to(then[name].device) for name in OF_CHANNELS}


def first_tokens(tensors: Tensors, tokens: int) -> dict[str, torch.Tensor]:
    return {name: rows[:, :tokens] if name in OF_TOKENS else rows for name, rows in tensors.items()}


def restore(
    numbers: torch.Tensor, scales: torch.Tensor, channels: tuple[torch.Tensor, torch.Tensor] | None, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantise int8 numbers [Hk, T, D] to rows [Hk, T, D] of a dtype.

    The rows are finite if scales and offsets are: values beyond the dtype's range are clamped to its largest value.

    Args:
        scales: [Hk, T], one per token.
        channels: scales and offsets [Hk, D] of the channels; None for values, which have none.
    """
    # A product has 7 + 8 significant bits, and 8 more with a channel's scale. It is exact in float32's 24 bits, so the
    # addition is the only rounding. A GPU, which may fuse multiply and add, thus gives the same bits as a CPU.
    # A scale larger than any of `quantise` is clamped: its product could be infinite, and infinity times a channel
    # scale of 0 is NaN.
    rows = numbers.float() * scales.float().clamp(-LARGEST_SCALE, LARGEST_SCALE)[..., None]
    if channels is not None:
        of_channels, offsets = (one.float()[:, None] for one in channels)
        rows.mul_(of_channels).add_(offsets)
    largest = torch.finfo(dtype).max
    return rows.clamp_(-largest, largest).to(dtype)


def _channels(keys: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute channel_scales and channel_offsets [Hk, D] of keys [Hk, N, D]."""
    # Without tokens there is no range, so the range of a single zero key is used.
    low, high = (keys if keys.shape[1] else keys.new_zeros(len(keys), 1, keys.shape[2])).aminmax(dim=1)
    low, high = low.float(), high.float()
    offsets = _bfloat16(low / 2 + high / 2)
    spread = torch.maximum(high - offsets.float(), offsets.float() - low)
    # A channel's scale is its spread to the power 0.75, which gives the smallest error; the tokens' scales cover the
    # rest. The power is computed with square roots, which every device rounds correctly: GPU and CPU store the same.
    root = spread.sqrt()
    scales = root * root.sqrt()
    # A channel with one value in all tokens gets the scale 1, because its value may differ in tokens appended later.
    return {"channel_scales": _bfloat16(torch.where(scales == 0, 1.0, scales)), "channel_offsets": offsets}


def _quantise_piece(keys: torch.Tensor, values: torch.Tensor, channels: Tensors) -> dict[str, torch.Tensor]:
    """Quantise keys and values [Hk, T, D] to the tensors of OF_TOKENS, with the channels' scales and offsets."""
    scales, offsets = (channels[name].float()[:, None] for name in OF_CHANNELS)
    normalised, exact_values = (keys.float() - offsets).div_(_divisors(scales)), values.float()
    key_scales, value_scales = _scales(normalised), _scales(exact_values)
    return {
        "keys": _rounded(normalised, key_scales),
        "values": _rounded(exact_values, value_scales),
        "key_scales": key_scales,
        "value_scales": value_scales,
    }


def _scales(rows: torch.Tensor) -> torch.Tensor:
    """Compute bfloat16 scales [Hk, T] of rows [Hk, T, D], so that each row's largest magnitude becomes LARGEST."""
    # A key far outside the channels' range may have become infinite, so the scale is clamped.
    return (rows.abs().amax(2) / LARGEST).clamp_(max=LARGEST_SCALE).to(torch.bfloat16)


def _bfloat16(rows: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(torch.bfloat16).max
    return rows.clamp(-largest, largest).to(torch.bfloat16)


def _rounded(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Divide rows [Hk, T, D] by scales [Hk, T] and round them to int8."""
    return (rows / _divisors(scales.float())[..., None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)


def _divisors(scales: torch.Tensor) -> torch.Tensor:
    # Where the scale is 0, all values of the row are 0 or too small for any scale; dividing by 1 avoids NaN.
    return torch.where(scales == 0, 1.0, scales)


CENTROID_FORM = "int8 of finest centroids"
"""Name of this int8 format. It is part of a file's recipe, so that no build reuses files of an earlier format."""
KEYS, VALUES = "level0.centroids", "level0.value_centroids"
CENTROID_NAMES = {
    "keys": KEYS,
    "values": VALUES,
    "key_scales": "level0.centroid_scales",
    "value_scales": "level0.value_centroid_scales",
    "channel_scales": "level0.centroid_channel_scales",
    "channel_offsets": "level0.centroid_channel_offsets",
}
"""Names of int8 centroids' tensors in a method's file, by the names that `quantise` gives them."""
FEWEST_SHARED = 32  # fewest clusters whose channel scales are reused: scales of fewer clusters fit new centroids badly
CENTROID_SCALES = frozenset(CENTROID_NAMES.values()) - {KEYS, VALUES}


def with_centroids_in_8_bits(tensors: Tensors, before: Tensors | None = None) -> dict[str, torch.Tensor]:
    """Return a method's tensors of one layer with the finest clusters' centroids in int8.

    A method without clusters gets its tensors back unchanged.

    Args:
        tensors: the tensors as an indexer builds them, with centroids in the index's dtype.
        before: the stored tensors of the same method before tokens were added. Their channel scales and offsets are
            used again, so that unchanged centroids keep their int8 numbers. New ones are computed if `before` has fewer
            than FEWEST_SHARED clusters, or fewer than half of the new number: scales of few centroids do not fit the
            others.
    """
    if KEYS not in tensors:
        return dict(tensors)
    keys, values = tensors[KEYS], tensors.get(VALUES)
    old = None if before is None else numbers_of(before)
    if old is not None and old["keys"].shape[1] < max(FEWEST_SHARED, keys.shape[1] / 2):
        old = None
    rounded = quantise(_without_empty(keys, tensors["level0.counts"]), keys if values is None else values, old)
    taken = {
        CENTROID_NAMES[name]: tensor for name, tensor in rounded.items() if values is not None or "value" not in name
    }
    return {**tensors, **taken}


def numbers_of(tensors: Tensors) -> dict[str, torch.Tensor] | None:
    """Return the tensors of int8 centroids under the names that `quantise` uses; None if centroids are not in int8.

    The tensors of value centroids are left out if the method has none.
    """
    if CENTROID_NAMES["key_scales"] not in tensors:
        return None
    return {name: tensors[stored] for name, stored in CENTROID_NAMES.items() if stored in tensors}


def with_restored_centroids(tensors: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a method's tensors of one layer with int8 centroids dequantised to a dtype, as an indexer builds them.

    Tensors whose centroids are not in int8 are returned unchanged. Allocates the centroids.
    """
    numbers = numbers_of(tensors)
    if numbers is None:
        return dict(tensors)
    channels = numbers["channel_scales"], numbers["channel_offsets"]
    found = {name: tensor for name, tensor in tensors.items() if name not in CENTROID_SCALES}
    found[KEYS] = restore(numbers["keys"], numbers["key_scales"], channels, dtype)
    if "values" in numbers:
        found[VALUES] = restore(numbers["values"], numbers["value_scales"], None, dtype)
    return found


def _without_empty(keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return centroids [Hk, C, D] in which those of empty clusters are replaced by the head's mean centroid.

    The centroid of an empty cluster is zero and is never read. Zero may be far outside the range of a channel, and
    would make the channel's scale larger.
    """
    filled = (counts > 0)[..., None]
    usual = (keys * filled).float().sum(1, keepdim=True) / filled.sum(1, keepdim=True).clamp(min=1)
    return torch.where(filled, keys, usual.to(keys.dtype))


Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [Hk, T, D]."""


Name: TypeAlias = Literal["keys", "values"]
NAMES: tuple[Name, ...] = ("keys", "values")
SCALES_OF: dict[Name, str] = {"keys": "key_scales", "values": "value_scales"}


@dataclass(frozen=True)
class ContextRows(ABC):
    """Keys and values [Hk, N, D] of one layer. The tensors of the layer's file are memory-mapped or on a GPU.

    Args:
        tensors: the tensors of the file, by name.
        dtype: the index's dtype, in which rows are returned.
    """

    tensors: Mapping[str, torch.Tensor]
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape (Hk, N, D) of the keys, and of the values."""
        return self.tensors["keys"].shape

    @abstractmethod
    def some(self, name: Name, tokens: slice) -> torch.Tensor:
        """Return keys or values [Hk, T, D] of some tokens in the index's dtype. Only int8 rows are copied."""

    def part(self, tokens: slice) -> Pair:
        """Return keys and values [Hk, T, D] of consecutive tokens in the index's dtype, as `some` does for one."""
        return self.some("keys", tokens), self.some("values", tokens)

    @abstractmethod
    def gather(self, tokens: torch.Tensor, first: int = 0) -> Pair:
        """Gather keys and values [Hk, R, D], in the index's dtype, of R tokens of each head.

        Args:
            tokens: token indices [Hk, R], counted from the token `first`.
        """

    def _picked(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """Select rows [Hk * R, ...] of a tensor [Hk, N, ...] by their flat indices [Hk * R] over heads and tokens."""
        return self.tensors[name].flatten(0, 1).index_select(0, flat)

    def _flat(self, tokens: torch.Tensor, first: int) -> torch.Tensor:
        heads, rows, _ = self.shape
        starts = torch.arange(first, heads * rows, rows, device=tokens.device)
        return (tokens + starts[:, None]).flatten()


class ExactRows(ContextRows):
    """Keys and values of a layer that are stored in the index's dtype."""

    def some(self, name: Name, tokens: slice) -> torch.Tensor:
        return self.tensors[name][:, tokens]

    def gather(self, tokens: torch.Tensor, first: int = 0) -> Pair:
        flat, shape = self._flat(tokens, first), (*tokens.shape, self.shape[2])
        return self._picked("keys", flat).view(shape), self._picked("values", flat).view(shape)


class Int8Stored(ContextRows):
    """Keys and values of a layer that are stored in int8, as `quantise` returns them.

    Only the requested rows are dequantised.
    """

    def some(self, name: Name, tokens: slice) -> torch.Tensor:
        first, stop, _ = tokens.indices(self.shape[1])
        stored, scales = self.tensors[name], self.tensors[SCALES_OF[name]]
        rows = stored.new_empty(len(stored), max(0, stop - first), stored.shape[2], dtype=self.dtype)
        for start in range(first, stop, PIECE):
            piece = slice(start, min(start + PIECE, stop))
            rows[:, start - first : piece.stop - first] = self._restored(name, stored[:, piece], scales[:, piece])
        return rows

    def gather(self, tokens: torch.Tensor, first: int = 0) -> Pair:
        parts = [self._gathered(some, first) for some in tokens.split(PIECE, 1)]
        if len(parts) == 1:
            return parts[0]
        keys, values = zip(*parts, strict=True)
        return torch.cat(keys, 1), torch.cat(values, 1)

    def _gathered(self, tokens: torch.Tensor, first: int) -> Pair:
        flat = self._flat(tokens, first)

        def some(name: Name) -> torch.Tensor:
            numbers, scales = (self._picked(one, flat).unflatten(0, tokens.shape) for one in (name, SCALES_OF[name]))
            return self._restored(name, numbers, scales)

        return some("keys"), some("values")

    def _restored(self, name: Name, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Dequantise int8 keys or values [Hk, T, D] with token scales [Hk, T]."""
        channels = (self.tensors["channel_scales"], self.tensors["channel_offsets"]) if name == "keys" else None
        return restore(numbers, scales, channels, self.dtype)


def context_rows(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> ContextRows:
    """Wrap the tensors of a layer's context file, int8 or exact, whose names and shapes `check_layout` has checked.

    Args:
        dtype: the index's dtype.
    """
    kind = Int8Stored if "key_scales" in tensors else ExactRows
    return kind(tensors, dtype)
