"""Keys, values and centroids of a layer as the index stores them, in the model's dtype or in int8."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

LARGEST = 127  # so that a number and its negative are both there
LARGEST_SCALE = 129 * 2.0**114  # the largest of bfloat16 that gives LARGEST a finite product in float32
PIECE = 8192  # tokens that are converted at a time, by way of float32
OF_TOKENS = ("keys", "values", "key_scales", "value_scales")
"""Names of the tensors [Hk, N, ...] that have something of each token."""
OF_CHANNELS = ("channel_scales", "channel_offsets")
"""Names of the tensors [Hk, D] that all keys share."""
SCALES = ("key_scales", "value_scales", *OF_CHANNELS)
"""Names of the tensors beside `keys` and `values`, all bfloat16: 2 bytes, with the range of float32."""
FORM = "int8 of tokens and channels"
"""The quantisation, as the recipe of its files names it: no build reuses files of an earlier one."""

Tensors = Mapping[str, torch.Tensor]


def quantise(keys: torch.Tensor, values: torch.Tensor, like: Tensors | None = None) -> dict[str, torch.Tensor]:
    """Keys and values [Hk, N, D], finite and of any floating dtype, in 8 bits, on their device.

    Each number is off by at most half its scale; a key's is its token's times its channel's. Needs the memory of the
    result and of PIECE tokens in float32.

    Args:
        like: the tensors of an earlier call whose channels these rows share because they continue its rows. A key
            outside the range of these channels makes its token's scale larger.

    Returns:
        keys, values [Hk, N, D] int8; key_scales, value_scales [Hk, N]; channel_scales, channel_offsets [Hk, D].
    """
    channels = _channels(keys) if like is None else {name: like[name].to(keys.device) for name in OF_CHANNELS}
    pieces = [
        _quantise_piece(*some, channels) for some in zip(keys.split(PIECE, 1), values.split(PIECE, 1), strict=True)
    ]
    return {name: torch.cat([piece[name] for piece in pieces], 1) for name in OF_TOKENS} | channels


def bounds(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Tensors of an int8 file that must be finite, by their names; none for other files. Of scales that is
    the largest product that they give, because kernels take them as they are."""
    found = {name: tensors[name] for name in SCALES if name in tensors}
    return {name: rows if name == "channel_offsets" else rows * LARGEST for name, rows in found.items()}


def row_bytes(channels: int) -> int:
    """Bytes of a token's keys or values of one head, with the scale of their own."""
    return channels + 2


def joined(first: Tensors, then: Tensors) -> dict[str, torch.Tensor]:
    """The tensors of `quantise` for tokens that follow one another, of which the later were made like the first."""
    of_tokens = {name: torch.cat([first[name].to(then[name].device), then[name]], 1) for name in OF_TOKENS}
    return of_tokens | {name: first[name].to(then[name].device) for name in OF_CHANNELS}


def first_tokens(tensors: Tensors, tokens: int) -> dict[str, torch.Tensor]:
    return {name: rows[:, :tokens] if name in OF_TOKENS else rows for name, rows in tensors.items()}


def restore(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    channels: tuple[torch.Tensor, torch.Tensor] | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows [Hk, T, D] of a dtype that numbers [Hk, T, D] mean, with scales [Hk, T] of tokens, and with scales and
    offsets [Hk, D] of channels where they have them.

    Finite if scales and offsets are: what rounding took beyond the dtype's largest number becomes that.
    """
    # A product has 7 + 8 bits, and 8 more with a channel's scale, of the 24 that float32 has: it is exact, and the sum
    # is the only rounding, so that a GPU, which may multiply and add at once, gives the same bits as a CPU.
    # A scale that `quantise` never gives is cut: it would make an infinity, and that times a channel's zero no number.
    rows = numbers.float() * scales.float().clamp(-LARGEST_SCALE, LARGEST_SCALE)[..., None]
    if channels is not None:
        of_channels, offsets = (one.float()[:, None] for one in channels)
        rows.mul_(of_channels).add_(offsets)
    largest = torch.finfo(dtype).max
    return rows.clamp_(-largest, largest).to(dtype)


def _channels(keys: torch.Tensor) -> dict[str, torch.Tensor]:
    """Scales and offsets [Hk, D] of the channels of keys [Hk, N, D]."""
    # Without tokens there is no range; that of a single zero does as well.
    low, high = (keys if keys.shape[1] else keys.new_zeros(len(keys), 1, keys.shape[2])).aminmax(dim=1)
    low, high = low.float(), high.float()
    offsets = _bfloat16(low / 2 + high / 2)
    spread = torch.maximum(high - offsets.float(), offsets.float() - low)
    # The exponent 0.75 loses least, a quarter of a channel's size being left to the tokens' scales. It is made of
    # roots, which every device rounds correctly: a GPU stores what a CPU stores.
    root = spread.sqrt()
    scales = root * root.sqrt()
    # A channel that is the same in all tokens may differ in those that continue them, and then needs a scale.
    return {"channel_scales": _bfloat16(torch.where(scales == 0, 1.0, scales)), "channel_offsets": offsets}


def _quantise_piece(keys: torch.Tensor, values: torch.Tensor, channels: Tensors) -> dict[str, torch.Tensor]:
    """The tensors of OF_TOKENS for keys and values [Hk, T, D]."""
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
    """bfloat16 scales [Hk, T] with which the largest number of a row of [Hk, T, D] is LARGEST."""
    # A key far outside the range of the channels that it is given may have become infinite.
    return (rows.abs().amax(2) / LARGEST).clamp_(max=LARGEST_SCALE).to(torch.bfloat16)


def _bfloat16(rows: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(torch.bfloat16).max
    return rows.clamp(-largest, largest).to(torch.bfloat16)


def _rounded(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows [Hk, T, D] as numbers, by scales [Hk, T]."""
    return (rows / _divisors(scales.float())[..., None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)


def _divisors(scales: torch.Tensor) -> torch.Tensor:
    # Where the scale is 0 all numbers are 0, or too small for any scale.
    return torch.where(scales == 0, 1.0, scales)


CENTROID_FORM = "int8 of finest centroids"
"""The quantisation, as the recipe of its files names it: no build reuses files of an earlier one."""
KEYS, VALUES = "level0.centroids", "level0.value_centroids"
CENTROID_NAMES = {
    "keys": KEYS,
    "values": VALUES,
    "key_scales": "level0.centroid_scales",
    "value_scales": "level0.value_centroid_scales",
    "channel_scales": "level0.centroid_channel_scales",
    "channel_offsets": "level0.centroid_channel_offsets",
}
"""Names of a method's tensors, by those of `int8_rows`."""
FEWEST_SHARED = 32  # channels of fewer centroids fit others badly
CENTROID_SCALES = frozenset(CENTROID_NAMES.values()) - {KEYS, VALUES}


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
    taken = {
        CENTROID_NAMES[name]: tensor for name, tensor in rounded.items() if values is not None or "value" not in name
    }
    return {**tensors, **taken}


def numbers_of(tensors: Tensors) -> dict[str, torch.Tensor] | None:
    """The centroids' tensors of 8 bits by the names of `int8_rows`, without those of values if the method has none;
    None where centroids are not in 8 bits."""
    if CENTROID_NAMES["key_scales"] not in tensors:
        return None
    return {name: tensors[stored] for name, stored in CENTROID_NAMES.items() if stored in tensors}


def with_restored_centroids(tensors: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A method's tensors of one layer as an indexer builds them, with the centroids in a dtype that 8 bits mean; all as
    they are where centroids are not in 8 bits. Allocates the centroids."""
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
    """Centroids [Hk, C, D] with the mean in the place of those of empty clusters: zeros, which nobody reads and which
    may be far outside of the range of channels."""
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
    """Keys and values [Hk, N, D] of one layer, wherever its file's tensors are: mapped, or on a device.

    Args:
        tensors: those of the file, by name.
    """

    tensors: Mapping[str, torch.Tensor]
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Hk, N and D."""
        return self.tensors["keys"].shape

    @abstractmethod
    def some(self, name: Name, tokens: slice) -> torch.Tensor:
        """Keys or values [Hk, T, D] of consecutive tokens, in the index's dtype: views where they are stored so."""

    def part(self, tokens: slice) -> Pair:
        """Both."""
        return self.some("keys", tokens), self.some("values", tokens)

    @abstractmethod
    def gather(self, tokens: torch.Tensor, first: int = 0) -> Pair:
        """Keys and values [Hk, R, D] of tokens [Hk, R], counted from the token `first` on, in the index's dtype."""

    def _picked(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """[Hk * R, D or nothing]: rows of a tensor [Hk, N, ...] by their number among those of all heads."""
        return self.tensors[name].flatten(0, 1).index_select(0, flat)

    def _flat(self, tokens: torch.Tensor, first: int) -> torch.Tensor:
        heads, rows, _ = self.shape
        starts = torch.arange(first, heads * rows, rows, device=tokens.device)
        return (tokens + starts[:, None]).flatten()


class ExactRows(ContextRows):
    """Rows that are stored in the index's dtype."""

    def some(self, name: Name, tokens: slice) -> torch.Tensor:
        return self.tensors[name][:, tokens]

    def gather(self, tokens: torch.Tensor, first: int = 0) -> Pair:
        flat, shape = self._flat(tokens, first), (*tokens.shape, self.shape[2])
        return self._picked("keys", flat).view(shape), self._picked("values", flat).view(shape)


class Int8Stored(ContextRows):
    """Rows that are stored in 8 bits, as `quantise` gives them; only what is asked for is restored."""

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
        """Keys or values [Hk, T, D] that numbers [Hk, T, D] with scales [Hk, T] mean."""
        channels = (self.tensors["channel_scales"], self.tensors["channel_offsets"]) if name == "keys" else None
        return restore(numbers, scales, channels, self.dtype)


def context_rows(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> ContextRows:
    """The rows of a layer's file, with the tensors that `formats.index.layout` requires in an index of a dtype."""
    kind = Int8Stored if "key_scales" in tensors else ExactRows
    return kind(tensors, dtype)
