"""Storage of the middle's keys and values during decoding: on the device, in host memory, or mapped from the index.

The middle are the tokens between sinks and tail.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from sparsekv.formats.index.context_rows import (
    NAMES,
    OF_CHANNELS,
    OF_TOKENS,
    ContextRows,
    Int8Stored,
    Name,
    context_rows,
    numbers_of,
    quantise,
    with_restored_centroids,
)
from sparsekv.formats.index.context_rows import Pair as Pair
from sparsekv.formats.index.layout import check_values
from sparsekv.formats.index.reader import CPU, Artifact
from sparsekv.kernels.common.kernel_inputs import Int8Kernel, RowScales, RunRows
from sparsekv.runtime.cache.buffers import GrowingRows


@dataclass
class LayerRows:
    """Keys and values [Hk, N, D] of one layer, in memory for each device from first use to `release`.

    On a CPU, the rows are views of one mapping of the index's file, and so releasing the pages of one view releases the
    pages of all views. On a GPU, the rows are a copy of the stored rows. For a layer of an 8B model at 131,072 tokens,
    the copy takes 0.5 GB in bfloat16, and half of that in int8. Once `on` has dequantised int8 rows to the index's
    dtype on a GPU, the dequantised copy replaces the int8 copy.
    """

    artifact: Artifact
    layer: int
    _stored: dict[torch.device, ContextRows] = field(default_factory=dict)
    _restored: dict[torch.device, Pair] = field(default_factory=dict)

    @property
    def stored(self) -> ContextRows:
        """The rows in their stored dtype, mapped from the index's file."""
        return self.stored_on(CPU)

    def stored_on(self, device: torch.device) -> ContextRows:
        """Return the rows in their stored dtype: mapped on a CPU, copied to a GPU."""
        if device not in self._stored:
            self._stored[device] = self.artifact.context_rows(self.layer, device)
        return self._stored[device]

    @property
    def mapped_keys(self) -> tuple[torch.Tensor, ...]:
        """Views of the index's file from which keys are read on a CPU."""
        return tuple(rows for name, rows in self.stored.tensors.items() if name.startswith("key"))

    def on(self, device: torch.device) -> Pair:
        """Return the keys and values on a device, in the index's dtype; int8 rows are dequantised."""
        if device not in self._restored:
            stored = self.stored_on(device)
            self._restored[device] = stored.part(slice(None))
            if device.type != "cpu" and isinstance(stored, Int8Stored):
                del self._stored[device]
        return self._restored[device]

    def part(self, tokens: slice, device: torch.device) -> Pair:
        """Return the keys and values [Hk, T, D] of T consecutive tokens on a device, in the index's dtype.

        If the rows are int8, only the rows of these tokens are dequantised, and the result is not cached. No row is
        dequantised if `on` has already dequantised all rows.
        """
        if device not in self._restored:
            return self.stored_on(device).part(tokens)
        keys, values = self._restored[device]
        return keys[:, tokens], values[:, tokens]

    def middle(self, name: Name, device: torch.device) -> torch.Tensor:
        """Return the keys or values [Hk, M, D] between sinks and tail.

        On a GPU, the result is contiguous. With several heads it is then a copy, so that `release` frees all other
        rows.
        """
        split = self.artifact.manifest.split
        tokens = slice(split.sinks, split.sinks + split.middle)
        if device in self._restored:
            rows = self._restored[device][NAMES.index(name)][:, tokens]
        else:
            rows = self.stored_on(device).some(name, tokens)
        return rows if device.type == "cpu" else rows.contiguous()

    def observed_queries(self, device: torch.device) -> torch.Tensor:
        """Return the queries [Hk, G, W, D] of the W tokens in the tail's first half."""
        heads, _ = self.artifact.heads_and_channels(self.layer)
        first_half = self.artifact.queries(self.layer, device)["tail"][:, : self.artifact.manifest.split.tail // 2]
        return first_half.reshape(heads, -1, *first_half.shape[1:])

    def method_tensors(self, name: str, device: torch.device) -> dict[str, torch.Tensor]:
        """Read the tensors that the indexer of a method built for this layer, and check the values of the tensors.

        Raises:
            ArtifactError: the tensors have values that no build writes.
        """
        tensors = self.artifact.method_tensors(name, self.layer, device)
        what = f"layer {self.layer} of {name} of {self.artifact.folder}"
        check_values(tensors, self.artifact.manifest.split, what)
        return tensors

    def release(self) -> None:
        """Drop the rows on all devices."""
        self._restored.clear()
        self._stored.clear()


PLACEMENTS = ("device", "host", "disk")
EVERY = slice(None)


@dataclass(frozen=True)
class PlacedRows:
    """Buffers [Hk, capacity, D] of keys and values that kernels read in place, with the scales if they are int8.

    The first rows of a buffer are in use.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: RowScales | None = None

    def first(self, used: int) -> RunRows:
        """Return references to the first `used` rows, one reference per row."""
        every = torch.arange(used, dtype=torch.int32, device=self.keys.device).expand(len(self.keys), -1)
        return RunRows(self.keys, self.values, every, None, used, scales=self.scales)


class MiddleRows(ABC):
    """Storage of one layer's keys and values between sinks and tail: `used` rows per head, in a selector's layout."""

    used: int
    reachable: bool
    """Whether `in_place` returns buffers: kernels can only read buffers on the model's device."""

    @abstractmethod
    def gather(self, rows: torch.Tensor) -> Pair:
        """Return the keys and values [Hk, R, D] of the rows with indices [Hk, R], as a copy on the model's device."""

    def in_place(self) -> PlacedRows | None:
        """Return the buffers of keys and values; None if they are not on the model's device."""
        return None

    @abstractmethod
    def from_row(self, start: int, heads: slice | torch.Tensor = EVERY) -> Pair:
        """Return the keys and values [Hk, used - start, D] of all rows from `start` on, on the model's device.

        Args:
            heads: return only these KV heads, given as a slice or as indices [n].
        """

    def in_any_order(self) -> Pair:
        """Return the keys and values [Hk, used, D] of all rows on the model's device, in the order fastest to read."""
        return self.from_row(0)

    @abstractmethod
    def rewrite(self, start: int, new: Pair | None, order: torch.Tensor) -> None:
        """Append new rows, or drop the appended rows. Then put all rows from `start` on into another order.

        Args:
            new: keys and values to append; None: drop all rows that were ever appended.
            order: [Hk, T], the new order, as indices into the rows from `start` on, followed by the new rows. If `new`
                is None, `order` contains no appended row.
        """


class MemoryRows(MiddleRows):
    """Rows in device or host memory, in a selector's layout.

    Allocates a copy of keys and values, unless `order` is None and they are contiguous and on the model's device. Rows
    on the host for a model on a GPU are copied to page-locked memory, so that selected rows are transferred
    asynchronously.

    Args:
        keys, values: [Hk, M, D] in order of position.
        order: [Hk, M], the layout; None for order of position.
        device: the model's device.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, order: torch.Tensor | None, device: torch.device):
        self.device = device
        self.pinned = keys.device != device
        self.reachable = not self.pinned
        laid_out = (lay_out(rows, order) for rows in (keys, values))
        self.keys, self.values = (GrowingRows(rows.pin_memory() if self.pinned else rows) for rows in laid_out)
        self.heads = torch.arange(len(keys), device=keys.device)[:, None]

    @property
    def used(self) -> int:  # type: ignore[override]
        return self.keys.used

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
    """Rows in the index's own files; only selected rows are read, and dequantised if they are stored in int8.

    The file is mapped before each read and unmapped after the read. Therefore the file's pages count as the system's
    page cache and not as this process's memory. The layout (8 bytes per token and head) and appended rows are in
    memory.

    Args:
        order: [Hk, M], the layout; None for order of position, in which rows can be appended but not permuted.
        device: the model's device.
        dtype: the dtype of the returned rows.
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
        """Return the rows [Hk, R, D] of tokens on the model's device.

        Args:
            stored: [Hk, R, D], the rows of the tokens that the index stores; any rows for appended tokens.
            new: the rows of the appended tokens.
            tokens: [Hk, R], positions, counted from the first token after the sinks. Appended tokens are last.
        """
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
    """Return rows [Hk, M, ...] in an order [Hk, M or fewer], for example with each cluster's rows consecutive.

    The result is contiguous. The rows are copied, unless `order` is None and the rows are already contiguous.
    """
    if order is None:
        return rows.contiguous()
    if rows.is_cuda:
        words = _in_words(rows)
        places = order.view(*order.shape, *[1] * (rows.dim() - 2)).expand(-1, -1, *words.shape[2:])
        return words.gather(1, places).view(rows.dtype)
    # On a CPU, `index_select` copies whole rows, and is many times as fast as `gather`, which copies single elements.
    laid_out = rows.new_empty(*order.shape, *rows.shape[2:])
    for of_head, named, out in zip(rows, order, laid_out, strict=True):
        torch.index_select(of_head, 0, named, out=out)
    return laid_out


def _in_words(rows: torch.Tensor) -> torch.Tensor:
    """View rows [Hk, M, D] as int64 if their size in bytes allows it, so that a gather on a GPU has fewer elements.

    A GPU looks up the index of every element separately.
    """
    fits = rows.dim() == 3 and rows.shape[2] * rows.itemsize % 8 == 0 and rows[0, :1].is_contiguous()
    return rows.view(torch.int64) if fits else rows


@dataclass
class MappedRows(MiddleRows):
    """Rows on a CPU that are read from the mapped file, until a call needs a copy of the rows in the layout.

    With a layout, with int8 rows, or with another dtype than the index's, the first call of `in_place` or `from_row`
    copies all rows of the middle once. The first call of `rewrite` always copies them. Until then the object allocates
    only the rows that `gather` and `in_any_order` return. Therefore an index opens without a copy, and a method whose
    steps only gather rows never copies the middle.

    Args:
        stored: keys and values [Hk, N, D] on the CPU, in order of position; int8 rows are dequantised when gathered.
        middle: slice of the N tokens that is between sinks and tail (the middle).
        order: [Hk, M], the layout; None for order of position.
        dtype: the dtype of the returned rows.
    """

    stored: ContextRows
    middle: slice
    order: torch.Tensor | None
    dtype: torch.dtype
    reachable: bool = True
    _mapped: PlacedRows | None = field(default=None, init=False)
    _laid_out: MemoryRows | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.order is None and self.dtype == self.stored.dtype and not isinstance(self.stored, Int8Stored):
            self._mapped = PlacedRows(*self.stored.part(self.middle))

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
        return self._mapped or self._in_memory().in_place()

    def from_row(self, start: int, heads: slice | torch.Tensor = EVERY) -> Pair:
        if self._mapped is None:
            return self._in_memory().from_row(start, heads)
        return self._mapped.keys[heads, start:], self._mapped.values[heads, start:]

    def in_any_order(self) -> Pair:
        if self._laid_out is not None:
            return self._laid_out.from_row(0)
        keys, values = self.stored.part(self.middle)
        return keys.to(self.dtype), values.to(self.dtype)

    def rewrite(self, start: int, new: Pair | None, order: torch.Tensor) -> None:
        self._in_memory().rewrite(start, new, order)

    def _in_memory(self) -> MemoryRows:
        if self._laid_out is None:
            keys, values = (rows.to(self.dtype) for rows in self.stored.part(self.middle))
            self._laid_out, self._mapped = MemoryRows(keys, values, self.order, keys.device), None
        return self._laid_out


LEAST_UNIT = 1e-30


class Int8Middle(MiddleRows):
    """Rows that stay in int8, which takes about half the memory of bfloat16; gathered rows are dequantised.

    Allocates a copy of the int8 rows and their scales in the layout. Appended rows are quantised to int8 too.

    Args:
        stored: the tensors of a context file in int8, for the middle's M tokens, on the model's device.
        order: [Hk, M], the layout; None for order of position.
        dtype: the dtype of dequantised rows.
    """

    def __init__(self, stored: Mapping[str, torch.Tensor], order: torch.Tensor | None, dtype: torch.dtype):
        self.rows = {name: GrowingRows(lay_out(rows, order)) for name, rows in side_by_side(stored).items()}
        self.channels = {name: stored[name] for name in OF_CHANNELS}
        self.units, self.dtype, self.reachable = units_of(stored["value_scales"]), dtype, True

    @property
    def used(self) -> int:  # type: ignore[override]
        return self.rows["keys"].used

    @property
    def _buffers(self) -> dict[str, torch.Tensor]:
        keys, values, scales = (self.rows[name].buffer for name in ("keys", "values", "scales"))
        named = {"keys": keys, "values": values, "key_scales": scales[..., 0], "value_scales": scales[..., 1]}
        return named | self.channels

    def gather(self, rows: torch.Tensor) -> Pair:
        return context_rows(self._buffers, self.dtype).gather(rows)

    def in_place(self) -> PlacedRows:
        return placed({name: rows.buffer for name, rows in self.rows.items()}, self.channels, self.units)

    def from_row(self, start: int, heads: slice | torch.Tensor = EVERY) -> Pair:
        of_heads = {name: rows[heads] for name, rows in self._buffers.items()}
        return context_rows(of_heads, self.dtype).part(slice(start, self.used))

    def rewrite(self, start: int, new: Pair | None, order: torch.Tensor) -> None:
        added = None if new is None else side_by_side(quantise(*new, like=self.channels))
        for name, rows in self.rows.items():
            old = rows.rows[:, start:]
            among = old if added is None else torch.cat([old, added[name].to(old)], 1)
            rows.write(start, lay_out(among, order.to(old.device)))
        self.units = units_of(self.rows["scales"].rows[..., 1])


def of_tokens(stored: Mapping[str, torch.Tensor], tokens: slice) -> dict[str, torch.Tensor]:
    """Return a context file's int8 tensors for the tokens `tokens` only, as views."""
    return {name: stored[name][:, tokens] for name in OF_TOKENS} | {name: stored[name] for name in OF_CHANNELS}


def side_by_side(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that have a row per token: keys, values [Hk, N, D], and scales [Hk, N, 2] of keys and values.

    The scales are a copy.
    """
    scales = torch.stack([stored["key_scales"], stored["value_scales"]], 2)
    return {"keys": stored["keys"], "values": stored["values"], "scales": scales}


def units_of(value_scales: torch.Tensor) -> torch.Tensor:
    """Return the units [Hk] of `RowScales`: the mean scale of each head's values.

    One outlier hardly changes the mean, and value scales divided by the mean fit in float16, as kernels need them.
    """
    # The lower bound keeps quotients by the unit finite; kernels also divide float values by the unit.
    return value_scales.float().abs().mean(1).nan_to_num().clamp(min=LEAST_UNIT)  # the mean over no rows is NaN


def read_centroids(
    stored: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], Int8Kernel | None]:
    """Return a method's tensors of one layer with dequantised centroids, and the int8 centroids as kernels take them.

    The dequantised centroids have the dtype `dtype`. The second result is None if the centroids are not stored in int8.
    Allocates the dequantised centroids and a copy of the scales.
    """
    numbers, tensors = numbers_of(stored), with_restored_centroids(stored, dtype)
    if numbers is None:
        return tensors, None
    # If a method has only key centroids, they are passed as value centroids, too; kernels do not read these.
    both = {"values": numbers["keys"], "value_scales": numbers["key_scales"]} | numbers
    rows = placed(side_by_side(both), both, units_of(both["value_scales"]))
    assert rows.scales is not None
    return tensors, Int8Kernel(rows.keys, rows.values, rows.scales)


def placed(rows: Mapping[str, torch.Tensor], channels: Mapping[str, torch.Tensor], units: torch.Tensor) -> PlacedRows:
    """Return int8 rows as kernels take them.

    Args:
        rows: keys, values and scales, as `side_by_side` returns them.
        channels: has `channel_scales` and `channel_offsets`, the scales and offsets of channels.
        units: as `units_of` returns them.
    """
    scales = RowScales(rows["scales"], channels["channel_scales"], channels["channel_offsets"], units)
    return PlacedRows(rows["keys"], rows["values"], scales)
