"""Write rows of an index into a paged KV cache, and compare rows that the engine has written with the index's rows.

The layout of a cache's blocks depends on backend, CPU and dtype, and this module does not assume one. Rows are written
by the engine's own function. A comparison writes the expected rows with this function too, and compares blocks.
`find_layout` finds where a block stores each number, by writing numbers that are all different.

Shapes have these letters: B blocks, N tokens of a block, Hk KV heads, D channels of a head, T tokens, and C elements
that a block has for each token and head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.context_rows import PIECE, ContextRows, Pair

Write: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys and values [T, Hk, D] into a cache [B, Hk, N, C] at slots [T]. A slot is block * N + token in block."""


@dataclass(frozen=True)
class PagedLayer:
    """A layer's paged KV cache.

    Attributes:
        cache: [B, Hk, N, C], of any strides.
        write: the engine's own function that stores keys and values in this cache.
        dtype: dtype of the keys and values that `write` takes.
        stored: dtype of the stored numbers; `cache` itself may be a tensor of bytes.
    """

    cache: torch.Tensor
    write: Write
    dtype: torch.dtype
    stored: torch.dtype

    def load(self, rows: ContextRows, first: int, slots: torch.Tensor) -> None:
        """Write the index's rows of the tokens from `first` on, one for each of `slots` [T], PIECE rows at a time."""
        for start in range(0, len(slots), PIECE):
            piece = slots[start : start + PIECE]
            tokens = slice(first + start, first + start + len(piece))
            self.write(*self._rows(rows, tokens), self.cache, piece.to(self.cache.device))

    def distance(self, rows: ContextRows, tokens: range, slots: torch.Tensor) -> float:
        """Compare the rows that the engine has written to the cache's `slots` [T] with an index's rows of `tokens`.

        Returns:
            The norm of the difference relative to the norm of the index's rows, both as stored in the cache.
        """
        size = self.cache.shape[2]
        blocks, local = torch.unique(slots // size, return_inverse=True)
        own = self.cache.index_select(0, blocks.to(self.cache.device))
        local_slots = (local * size + slots % size).to(self.cache.device)
        expected = self._rows(rows, slice(tokens.start, tokens.stop))
        # `replaced` and `own` differ only in the compared rows. `alone` has only the index's rows, and zeros elsewhere.
        replaced, alone = self._scratch(len(blocks)), self._scratch(len(blocks))
        replaced.copy_(own)
        for scratch in (replaced, alone):
            self.write(*expected, scratch, local_slots)
        difference = (self._floats(replaced) - self._floats(own)).norm()
        return float(difference / self._floats(alone).norm().clamp(min=torch.finfo(torch.float32).tiny))

    def _rows(self, rows: ContextRows, tokens: slice) -> Pair:
        """Return the index's keys and values [T, Hk, D] in the dtype that `write` takes, on the cache's device."""
        keys, values = (one.to(self.cache.device, self.dtype).transpose(0, 1).contiguous() for one in rows.part(tokens))
        return keys, values

    def _scratch(self, blocks: int) -> torch.Tensor:
        """Return zeros [blocks, Hk, N, C] with the strides of the cache."""
        shape = (blocks, *self.cache.shape[1:])
        return torch.empty_strided(shape, self.cache.stride(), dtype=self.cache.dtype, device=self.cache.device).zero_()

    def numbers(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the contents [B, ...] of blocks [B, Hk, N, C], whose bytes are numbers of the dtype `stored`."""
        return blocks.contiguous().view(self.stored).flatten(1)

    def _floats(self, blocks: torch.Tensor) -> torch.Tensor:
        return self.numbers(blocks).float()

    def find_layout(self, channels: int) -> "BlockLayout":
        """Find where a block stores each channel of its keys and values, by writing distinct numbers to an empty block.

        Raises:
            UsageError: the cache does not store each number once, without rounding.
        """
        _, heads, size, _ = self.cache.shape
        count, found = 2 * size * heads * channels, torch.zeros((), dtype=torch.int64)
        names, slots = torch.arange(1, count + 1).view(2, size, heads, channels), torch.arange(size)
        place = 1
        while place <= count:
            block = self._scratch(1)
            keys, values = (names // place % DIGITS).to(self.cache.device, self.dtype)
            self.write(keys, values, block, slots.to(self.cache.device))
            found = found + place * self.numbers(block)[0].float().cpu().long()
            place *= DIGITS
        places = found.argsort()[-count:]
        if found.count_nonzero() != count or not torch.equal(found[places], names.flatten()):
            raise UsageError(
                "the engine's cache rounds keys and values, so that sparse decode steps cannot read them; use "
                "--kv-cache-dtype auto, or leave the method out"
            )
        keys, values = places.to(self.cache.device).view_as(names)
        return BlockLayout(keys, values)


DIGITS = 128
"""Base of the numbers in `find_layout`: each digit is exact in bfloat16."""


@dataclass(frozen=True)
class BlockLayout:
    """Places of the keys and values of a cache block's N tokens: indices [N, Hk, D] int64 into the flattened block."""

    keys: torch.Tensor
    values: torch.Tensor

    def read(self, layer: PagedLayer, slots: torch.Tensor) -> Pair:
        """Read the keys and values [Hk, T, D] of tokens, by their slots in the cache of a layer with this layout."""
        size = layer.cache.shape[2]
        blocks, local = torch.unique(slots // size, return_inverse=True)
        numbers = layer.numbers(layer.cache.index_select(0, blocks.to(layer.cache.device)))
        in_block, rows = (slots % size).to(numbers.device), local.to(numbers.device)[:, None, None]
        keys, values = (numbers[rows, places[in_block]].transpose(0, 1) for places in (self.keys, self.values))
        return keys, values


def slots_of(blocks: Sequence[int], size: int, tokens: range) -> torch.Tensor:
    """Return the slots [T] int64 of a request's tokens.

    Args:
        blocks: numbers of the blocks, from the token at position 0 on.
        size: number of tokens of a block.
        tokens: the tokens' positions.
    """
    positions = torch.arange(tokens.start, tokens.stop)
    return torch.tensor(blocks)[positions // size] * size + positions % size
