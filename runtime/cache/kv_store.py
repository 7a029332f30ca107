"""Storage of the middle's keys and values during decoding: on the device, in host memory, or in the index's files."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from sparsekv.formats.context_rows import Pair as Pair
from sparsekv.formats.errors import UsageError
from sparsekv.formats.reader import Artifact
from sparsekv.formats.suggestions import choose_one
from sparsekv.kernels.common.eight_bits import RowScales
from sparsekv.runtime.cache.growing import GrowingRows

PLACEMENTS = ("device", "host", "disk")
EVERY = slice(None)


def check_placement(placement: str) -> None:
    """Raise UsageError for an unknown placement."""
    if placement not in PLACEMENTS:
        raise UsageError(f"--placement {placement}: {choose_one(placement, PLACEMENTS)}")


@dataclass(frozen=True)
class PlacedRows:
    """Buffers of keys and values [Hk, used or more, D] where they lie, and of numbers in 8 bits what they mean."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: RowScales | None = None


class MiddleRows(ABC):
    """Keys and values of one layer's middle: `used` rows per head, in a selector's layout."""

    used: int
    reachable: bool
    """Whether `in_place` gives buffers: only those on the model's device can be read by its kernels."""

    @abstractmethod
    def gather(self, rows: torch.Tensor) -> Pair:
        """Keys and values [Hk, R, D] of rows [Hk, R], copied to the model's device."""

    def in_place(self) -> PlacedRows | None:
        """The buffers, without a copy; None unless on the model's device."""
        return None

    @abstractmethod
    def from_row(self, start: int, heads: slice | torch.Tensor = EVERY) -> Pair:
        """Keys and values of all rows from `start` on, [Hk, used - start, D], on the model's device; of some heads, by
        their numbers [n]."""

    def in_any_order(self) -> Pair:
        """Keys and values of all rows [Hk, used, D] on the model's device, in the order that takes least to read."""
        return self.from_row(0)

    @abstractmethod
    def rewrite(self, start: int, new: Pair | None, order: torch.Tensor) -> None:
        """Append new rows and put all rows from `start` on into another order.

        Args:
            new: keys and values to append; None: drop all rows that were ever appended.
            order: [Hk, T], indices into the rows from `start` on followed by the new ones; without `new` it contains
                no appended row.
        """


class MemoryRows(MiddleRows):
    """Rows in device or host memory, in a selector's layout.

    Allocates nothing if the given tensors are already in that layout; else a copy of keys and values. Rows on the host
    for a model on a GPU are in page-locked memory, so that chosen rows are transferred asynchronously.

    Args:
        keys, values: [Hk, M, D] in order of position.
        order: [Hk, M], the layout; None for order of position.
        device: the model's.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, order: torch.Tensor | None, device: torch.device):
        self.device = device
        self.pinned = keys.device != device
        self.reachable = not self.pinned
        self.keys, self.values = (GrowingRows(self._lay_out(rows, order)) for rows in (keys, values))
        self.heads = torch.arange(len(keys), device=keys.device)[:, None]

    @property
    def used(self) -> int:  # type: ignore[override]
        return self.keys.used

    def _lay_out(self, rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        laid_out = lay_out(rows, order)
        return laid_out.pin_memory() if self.pinned else laid_out

    def gather(self, rows: torch.Tensor) -> Pair:
        flat = torch.add(rows.to(self.heads.device), self.heads, alpha=self.keys.buffer.shape[1]).flatten()
        return self._picked(self.keys.buffer, flat), self._picked(self.values.buffer, flat)

    def _picked(self, buffer: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        Hk, rows, D = buffer.shape
        everything = buffer.view(Hk * rows, D)
        if not self.pinned:
            return everything.index_select(0, flat).view(Hk, -1, D)
        room = buffer.new_empty(len(flat), D, pin_memory=True)
        picked = torch.index_select(everything, 0, flat, out=room)
        return picked.view(Hk, -1, D).to(self.device, non_blocking=True)

    def in_place(self) -> PlacedRows | None:
        return None if self.pinned else PlacedRows(self.keys.buffer, self.values.buffer)

    def from_row(self, start: int, heads: slice | torch.Tensor = EVERY) -> Pair:
        some = heads if isinstance(heads, slice) else heads.to(self.heads.device)
        return self.keys.rows[some, start:].to(self.device), self.values.rows[some, start:].to(self.device)

    def rewrite(self, start: int, new: Pair | None, order: torch.Tensor) -> None:
        for number, rows in enumerate((self.keys, self.values)):
            old = rows.rows[:, start:]
            among = old if new is None else torch.cat([old, new[number].to(old)], 1)
            rows.write(start, lay_out(among, order.to(old.device)))


class DiskRows(MiddleRows):
    """Rows in the index's own files; only chosen rows are read, and restored where they are stored in 8 bits.

    The file is mapped again for each read and unmapped after it, so that pages count as the system's page cache and not
    as this process's memory. Keeps the layout, 8 bytes per token and head, and appended rows in memory.

    Args:
        order: [Hk, M], the layout; None for order of position, in which rows can be appended but not permuted.
    """

    def __init__(
        self, artifact: Artifact, layer: int, order: torch.Tensor | None, device: torch.device, dtype: torch.dtype
    ):
        self.artifact, self.layer, self.device, self.dtype = artifact, layer, device, dtype
        self.reachable = False
        self.split = artifact.manifest.split
        heads, channels = artifact.heads_and_channels(layer)
        self.heads = heads
        self.tokens = None if order is None else GrowingRows(order.cpu())
        self.nothing = torch.empty(heads, 0, channels, dtype=dtype, device=device)
        self.new = GrowingRows(self.nothing), GrowingRows(self.nothing)

    @property
    def used(self) -> int:  # type: ignore[override]
        return self.split.middle + self.new[0].used

    def gather(self, rows: torch.Tensor) -> Pair:
        tokens = rows.cpu() if self.tokens is None else self.tokens.rows.gather(1, rows.cpu())
        stored = self.artifact.context_rows(self.layer)
        keys, values = stored.gather(tokens.clamp(max=self.split.middle - 1), self.split.sinks)
        return self._with_new(keys, self.new[0], tokens), self._with_new(values, self.new[1], tokens)

    def _with_new(self, stored: torch.Tensor, new: GrowingRows, tokens: torch.Tensor) -> torch.Tensor:
        """Stored rows [Hk, R, D] on the model's device, with appended rows in place of those of later tokens."""
        picked = stored.to(self.device, self.dtype)
        if not new.used:
            return picked
        later = (tokens - self.split.middle).to(self.device)[..., None]
        return torch.where(later < 0, picked, new.rows.gather(1, later.clamp(min=0).expand(-1, -1, picked.shape[2])))

    def from_row(self, start: int, heads: slice | torch.Tensor = EVERY) -> Pair:
        keys, values = self.gather(torch.arange(start, self.used).expand(self.heads, -1))
        return keys[heads], values[heads]

    def in_any_order(self) -> Pair:
        middle = slice(self.split.sinks, self.split.sinks + self.split.middle)
        stored = self.artifact.context_rows(self.layer).part(middle)
        (keys, values), (new_keys, new_values) = (rows.to(self.nothing) for rows in stored), self.new
        return torch.cat([keys, new_keys.rows], 1), torch.cat([values, new_values.rows], 1)

    def rewrite(self, start: int, new: Pair | None, order: torch.Tensor) -> None:
        before = self.used
        if new is None:
            self.new = GrowingRows(self.nothing), GrowingRows(self.nothing)
        else:
            for rows, more in zip(self.new, new, strict=True):
                rows.write(rows.used, more.to(self.nothing))
        if self.tokens is not None:
            added = torch.arange(before, max(before, self.used)).expand(self.heads, -1)
            among = torch.cat([self.tokens.rows[:, start:], added], 1)
            self.tokens.write(start, among.gather(1, order.cpu()))


def lay_out(rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Rows [Hk, M, ...] in an order [Hk, M or fewer], such as one that makes each cluster's rows consecutive.

    Contiguous; copies unless the rows are so already and `order` is None.
    """
    if order is None:
        return rows.contiguous()
    if rows.is_cuda:
        words = _in_words(rows)
        places = order.view(*order.shape, *[1] * (rows.dim() - 2)).expand(-1, -1, *words.shape[2:])
        return words.gather(1, places).view(rows.dtype)
    # A CPU copies rows, which an index of one axis names, many times as fast as single numbers.
    laid_out = rows.new_empty(*order.shape, *rows.shape[2:])
    for of_head, named, out in zip(rows, order, laid_out, strict=True):
        torch.index_select(of_head, 0, named, out=out)
    return laid_out


def _in_words(rows: torch.Tensor) -> torch.Tensor:
    """Rows [Hk, M, D] as numbers of 8 bytes where they fit: a GPU looks every number's place up by itself."""
    fits = rows.dim() == 3 and rows.shape[2] * rows.itemsize % 8 == 0 and rows[0, :1].is_contiguous()
    return rows.view(torch.int64) if fits else rows
