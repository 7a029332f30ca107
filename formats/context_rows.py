"""One layer's keys and values as its file stores them, and what they mean in the index's dtype."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from sparsekv.formats.int8_rows import KEY_BLOCK, PIECE, restore

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
        for start, end in _pieces(first, stop):
            piece = slice(start - first, end - first)
            keys[:, piece] = self._keys(start, end)
            numbers, scales = (self.tensors[name][:, start:end] for name in ("values", "value_scales"))
            values[:, piece] = restore(numbers, scales[..., None], None, self.dtype)
        return keys, values

    def gather(self, tokens: torch.Tensor, first: int = 0) -> Pair:
        flat, shape = self._flat(tokens, first), (*tokens.shape, self.shape[2])
        heads, blocks, _ = self.tensors["key_scales"].shape
        starts = torch.arange(0, heads * blocks, blocks, device=tokens.device)[:, None]
        in_block = ((tokens + first).div(KEY_BLOCK, rounding_mode="floor") + starts).flatten()
        scales, offsets = self._picked("key_scales", in_block), self._picked("key_offsets", in_block)
        keys = restore(self._picked("keys", flat), scales, offsets, self.dtype)
        value_scales = self._picked("value_scales", flat)[:, None]
        values = restore(self._picked("values", flat), value_scales, None, self.dtype)
        return keys.view(shape), values.view(shape)

    def _keys(self, start: int, end: int) -> torch.Tensor:
        """Keys [Hk, T, D] of whole blocks, or of a part of one block."""
        numbers = self.tensors["keys"][:, start:end]
        blocks = slice(start // KEY_BLOCK, -(-end // KEY_BLOCK))
        scales, offsets = (self.tensors[name][:, blocks] for name in ("key_scales", "key_offsets"))
        if scales.shape[1] == 1:
            return restore(numbers, scales, offsets, self.dtype)
        in_blocks = numbers.unflatten(1, (-1, KEY_BLOCK))
        return restore(in_blocks, scales[:, :, None], offsets[:, :, None], self.dtype).flatten(1, 2)


def _pieces(first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Ranges that the tokens from `first` to `stop` fall into: whole blocks, at most PIECE tokens, and parts of one."""
    start = first
    while start < stop:
        left = stop // KEY_BLOCK * KEY_BLOCK - start
        whole = min(left, PIECE) if start % KEY_BLOCK == 0 and left > 0 else KEY_BLOCK - start % KEY_BLOCK
        yield start, (start := min(start + whole, stop))


def context_rows(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> ContextRows:
    """The rows of a layer's file, whose tensors are those that `formats.layout` requires, in an index of a dtype."""
    kind = Int8Rows if "key_scales" in tensors else ExactRows
    return kind(tensors, dtype)
