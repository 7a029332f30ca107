"""One layer's keys and values as its file stores them, and what they mean in the index's dtype."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from sparsekv.formats.int8_rows import PIECE, restore

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
        dtype: the index's.
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


class Int8Rows(ContextRows):
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
    """The rows of a layer's file, whose tensors are those that `formats.layout` requires, in an index of a dtype."""
    kind = Int8Rows if "key_scales" in tensors else ExactRows
    return kind(tensors, dtype)
