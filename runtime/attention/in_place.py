"""Rows in place as the kernels take them, which read them where they lie."""

import torch

from sparsekv.kernels.attention.types import RunRows
from sparsekv.runtime.cache.kv_store import Pair, PlacedRows
from sparsekv.runtime.selection.selection import RowSet


def everything(rows: PlacedRows, used: int, exact: Pair) -> tuple[RunRows, Pair]:
    """The first `used` rows and the exact ones, as the runs and exact rows that `shared_decode` takes.

    Unless they are in 8 bits the rows take the place of the exact ones, of which it looks up no numbers. Allocates
    those of the others."""
    if rows.scales is not None:
        return _each(rows, used), exact
    return _each(PlacedRows(*exact), exact[0].shape[1]), (rows.keys[:, :used], rows.values[:, :used])


def _each(rows: PlacedRows, used: int) -> RunRows:
    """The first `used` rows, one by one."""
    every = torch.arange(used, dtype=torch.int32, device=rows.keys.device).expand(len(rows.keys), -1)
    return RunRows(rows.keys, rows.values, every, None, used, scales=rows.scales)


def in_place_runs(rows: PlacedRows, chosen: RowSet) -> RunRows:
    """Rows that one query chose, or several share, as references into keys and values in place."""
    keys, values = rows.keys, rows.values
    if chosen.indices is not None:
        # None where every slot is used: kernels then need not read the count.
        used = None if chosen.total == chosen.capacity else chosen.indices.used
        rest = chosen.capacity, used, chosen.indices.queue
        return RunRows(keys, values, chosen.indices.rows, None, *rest, scales=rows.scales)
    lengths = chosen.run_lengths
    ends = None if lengths is None else lengths.cumsum(-1, dtype=torch.int32)[:, 0]
    return RunRows(keys, values, chosen.starts[:, 0], ends, chosen.capacity, scales=rows.scales)
