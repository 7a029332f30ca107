"""What is stored in 8 bits, as kernels of a GPU read it where it lies: the middle's keys and values, and centroids."""

from collections.abc import Mapping

import torch

from sparsekv.formats.context_rows import context_rows
from sparsekv.formats.int8_centroids import numbers_of, with_restored_centroids
from sparsekv.formats.int8_rows import OF_CHANNELS, OF_TOKENS, quantise
from sparsekv.kernels.common.eight_bits import RowScales, RowsOf8Bits
from sparsekv.runtime.cache.growing import GrowingRows
from sparsekv.runtime.cache.kv_store import EVERY, MiddleRows, Pair, PlacedRows, lay_out

LEAST_UNIT = 1e-30


class RowsIn8Bits(MiddleRows):
    """Rows that stay in 8 bits, half the memory of bfloat16; whatever gathers some gets them restored.

    Allocates a copy of the numbers and their scales in the layout. Appended rows are rounded to 8 bits too.

    Args:
        stored: the tensors of a context's file in 8 bits, of the middle's M tokens, on the model's device.
        order: [Hk, M], the layout; None for order of position.
        dtype: the model's.
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
    """Those tensors for some of the tokens alone; views."""
    return {name: stored[name][:, tokens] for name in OF_TOKENS} | {name: stored[name] for name in OF_CHANNELS}


def side_by_side(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """keys, values [Hk, N, D], and scales [Hk, N, 2] of both, a copy: what has something of each token."""
    scales = torch.stack([stored["key_scales"], stored["value_scales"]], 2)
    return {"keys": stored["keys"], "values": stored["values"], "scales": scales}


def units_of(value_scales: torch.Tensor) -> torch.Tensor:
    """The units [Hk] of `RowScales`: the mean, which one outlier hardly moves, and no token's scale is far from it."""
    # So that what is over it stays a number: values beside that are not in 8 bits.
    return value_scales.float().abs().mean(1).nan_to_num().clamp(min=LEAST_UNIT)  # of no rows the mean is no number


def read_centroids(
    stored: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], RowsOf8Bits | None]:
    """A method's tensors of one layer, with the centroids in a dtype that 8 bits mean, and these as kernels take them;
    None where centroids are not in 8 bits. Allocates the centroids, and their scales side by side."""
    numbers, tensors = numbers_of(stored), with_restored_centroids(stored, dtype)
    if numbers is None:
        return tensors, None
    # Who reads centroids of values reads those of keys too, but not the other way round.
    both = {"values": numbers["keys"], "value_scales": numbers["key_scales"]} | numbers
    rows = placed(side_by_side(both), both, units_of(both["value_scales"]))
    assert rows.scales is not None
    return tensors, RowsOf8Bits(rows.keys, rows.values, rows.scales)


def placed(rows: Mapping[str, torch.Tensor], channels: Mapping[str, torch.Tensor], units: torch.Tensor) -> PlacedRows:
    """Rows that are `side_by_side`, as kernels take them, with their `units_of`."""
    scales = RowScales(rows["scales"], channels["channel_scales"], channels["channel_offsets"], units)
    return PlacedRows(rows["keys"], rows["values"], scales)
