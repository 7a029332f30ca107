"""One layer's keys and values as its file stores them, and what they mean in the index's dtype."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from sparsekv.formats.int8_rows import OF_TOKENS, PIECE, restore

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [Hk, T, D]."""


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
    def part(self, tokens: slice) -> Pair:
        """Keys and values [Hk, T, D] of consecutive tokens, in the index's dtype: views where they are stored so."""

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

    def part(self, tokens: slice) -> Pair:
        return self.tensors["keys"][:, tokens], self.tensors["values"][:, tokens]

    def gather(self, tokens: torch.Tensor, first: int = 0) -> Pair:
        flat, shape = self._flat(tokens, first), (*tokens.shape, self.shape[2])
        return self._picked("keys", flat).view(shape), self._picked("values", flat).view(shape)


class Int8Rows(ContextRows):
    """Rows that are stored in 8 bits, as `quantise` gives them; only what is asked for is restored."""

    def part(self, tokens: slice) -> Pair:
        first, stop, _ = tokens.indices(self.shape[1])
        heads, _, channels = self.shape
        keys = self.tensors["keys"].new_empty(heads, max(0, stop - first), channels, dtype=self.dtype)
        values = torch.empty_like(keys)
        for start in range(first, stop, PIECE):
            end = min(start + PIECE, stop)
            piece = slice(start - first, end - first)
            stored = {name: self.tensors[name][:, start:end] for name in OF_TOKENS}
            keys[:, piece], values[:, piece] = self._restored(stored)
        return keys, values

    def gather(self, tokens: torch.Tensor, first: int = 0) -> Pair:
        parts = [self._gathered(some, first) for some in tokens.split(PIECE, 1)]
        if len(parts) == 1:
            return parts[0]
        keys, values = zip(*parts, strict=True)
        return torch.cat(keys, 1), torch.cat(values, 1)

    def _gathered(self, tokens: torch.Tensor, first: int) -> Pair:
        flat = self._flat(tokens, first)
        return self._restored({name: self._picked(name, flat).unflatten(0, tokens.shape) for name in OF_TOKENS})

    def _restored(self, stored: Mapping[str, torch.Tensor]) -> Pair:
        """Keys and values [Hk, T, D] of what is stored of some tokens, [Hk, T, ...]."""
        channels = self.tensors["channel_scales"], self.tensors["channel_offsets"]
        keys = restore(stored["keys"], stored["key_scales"], channels, self.dtype)
        return keys, restore(stored["values"], stored["value_scales"], None, self.dtype)


def context_rows(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> ContextRows:
    """The rows of a layer's file, whose tensors are those that `formats.layout` requires, in an index of a dtype."""
    kind = Int8Rows if "key_scales" in tensors else ExactRows
    return kind(tensors, dtype)
