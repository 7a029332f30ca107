"""The middle's keys and values where an index's files are mapped, until something needs them in a layout."""

from dataclasses import dataclass, field

import torch

from sparsekv.runtime.cache.kv_store import MemoryRows, MiddleRows, Pair


@dataclass
class MappedRows(MiddleRows):
    """Rows that are gathered from the mapping, one by one, by whatever asks for some of them.

    The first call that wants them in place or changes them copies them once, in the layout; nothing is allocated before
    that, so an index opens without it, and a method whose steps gather never copies.

    Args:
        stored: keys and values [Hk, N, D] on the CPU, in order of position.
        middle: which of the N are the middle.
        order: [Hk, M], the layout; None for order of position.
        dtype: the model's.
    """

    stored: Pair
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
        Hk, N, _ = self.stored[0].shape
        flat = (tokens + torch.arange(self.middle.start, Hk * N, N)[:, None]).flatten()
        keys, values = (
            of.flatten(0, 1).index_select(0, flat).view(Hk, -1, of.shape[2]).to(self.dtype) for of in self.stored
        )
        return keys, values

    def in_place(self) -> Pair:
        return self._in_memory().keys.buffer, self._in_memory().values.buffer

    def from_row(self, start: int) -> Pair:
        return self._in_memory().from_row(start)

    def rewrite(self, start: int, new: Pair | None, order: torch.Tensor) -> None:
        self._in_memory().rewrite(start, new, order)

    def _in_memory(self) -> MemoryRows:
        if self._laid_out is None:
            keys, values = (of[:, self.middle].to(self.dtype) for of in self.stored)
            self._laid_out = MemoryRows(keys, values, self.order, keys.device)
        return self._laid_out
