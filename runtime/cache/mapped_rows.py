"""The middle's keys and values where an index's files are mapped, until something needs them in a layout."""

from dataclasses import dataclass, field

import torch

from sparsekv.formats.context_rows import ContextRows
from sparsekv.runtime.cache.kv_store import EVERY, MemoryRows, MiddleRows, Pair, PlacedRows


@dataclass
class MappedRows(MiddleRows):
    """Rows that are gathered from the mapping, one by one, by whatever asks for some of them.

    The first call that wants them in place or changes them, or many of them in a layout, copies them once; nothing is
    allocated before that, so an index opens without it, and a method whose steps gather never copies.

    Args:
        stored: keys and values [Hk, N, D] on the CPU, in order of position; in 8 bits, they are restored as they are
            gathered.
        middle: which of the N are the middle.
        order: [Hk, M], the layout; None for order of position.
        dtype: the model's.
    """

    stored: ContextRows
    middle: slice
    order: torch.Tensor | None
    dtype: torch.dtype
    reachable: bool = True
    _laid_out: MemoryRows | None = field(default=None, init=False)

    @property
    def used(self) -> int:  # type: ignore[override]
        return self.middle.stop - self.middle.start if self._laid_out is None else self._laid_out.used

    def gather(self, rows: torch.Tensor) -> Pair:
        if self._laid_out is not None:
            return self._laid_out.gather(rows)
        tokens = rows if self.order is None else self.order.gather(1, rows)
        keys, values = self.stored.gather(tokens, self.middle.start)
        return keys.to(self.dtype), values.to(self.dtype)

    def in_place(self) -> PlacedRows | None:
        return self._in_memory().in_place()

    def from_row(self, start: int, heads: slice | torch.Tensor = EVERY) -> Pair:
        if self._laid_out is not None or self.order is not None:
            return self._in_memory().from_row(start, heads)
        keys, values = self._from_token(start)
        return keys[heads], values[heads]

    def in_any_order(self) -> Pair:
        return self._from_token(0) if self._laid_out is None else self._laid_out.from_row(0)

    def _from_token(self, start: int) -> Pair:
        """Keys and values of the middle's tokens from `start` on."""
        keys, values = self.stored.part(slice(self.middle.start + start, self.middle.stop))
        return keys.to(self.dtype), values.to(self.dtype)

    def rewrite(self, start: int, new: Pair | None, order: torch.Tensor) -> None:
        self._in_memory().rewrite(start, new, order)

    def _in_memory(self) -> MemoryRows:
        if self._laid_out is None:
            keys, values = (rows.to(self.dtype) for rows in self.stored.part(self.middle))
            self._laid_out = MemoryRows(keys, values, self.order, keys.device)
        return self._laid_out
