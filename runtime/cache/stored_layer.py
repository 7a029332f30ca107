"""Cache layers over a stored context: the base class, which keeps the new rows, and dense layers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.cache_utils import CacheLayerMixin

from sparsekv.kernels.attention.attention import Segment, attend, causal_mask
from sparsekv.kernels.attention.decode_attention import decode_attention
from sparsekv.kernels.attention.types import RunRows
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.cache.read_rows import ReadRows

FIRST_NEW_ROWS = 256
MissedShares = tuple[float, float, float]
"""Mean missed share, and the shares of heads with a budget raised by a guard and with dense attention."""


@dataclass(frozen=True)
class Slot:
    """Where a decode step writes its row: `row` [1] int64, and `count` [1] int32, the number of rows including it. Both
    are on the device, so that each replay of a captured step writes to another row."""

    row: torch.Tensor
    count: torch.Tensor


class StoredLayer(CacheLayerMixin):
    """One layer with `stored` stored tokens, and a buffer for new ones that doubles when it is full.

    The buffer may begin with stored rows that are attended like new ones (`first_keys`, `first_values` [Hk, E, D]:
    sinks and tail of a sparse layer); `rewind` drops everything after these. The sequences of a batch are concatenated
    along the heads.
    """

    is_sliding = False
    capturable = True
    """Whether a captured decode step can be replayed for all that follow."""

    read: ReadRows | None = None
    """Counts the rows read by decode steps; None for a dense layer, which reads all."""

    def __init__(self, stored: int, first_keys: torch.Tensor, first_values: torch.Tensor):
        super().__init__()  # type: ignore[no-untyped-call]
        self.stored, self.first, self.used = stored, first_keys.shape[1], first_keys.shape[1]
        self.slot: Slot | None = None
        rows = self.first + FIRST_NEW_ROWS
        # Zeros, because masked rows must still be finite numbers.
        self.keys = first_keys.new_zeros(first_keys.shape[0], rows, first_keys.shape[2])
        self.values = first_values.new_zeros(first_values.shape[0], rows, first_values.shape[2])
        self.keys[:, : self.first], self.values[:, : self.first] = first_keys, first_values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffers are allocated in the constructor."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new rows [batch, Hk, Q, D]; the attention function reads the layer itself, not the returned tensors.

        Between `reserve` and `release` only one row, which `advance` then counts.
        """
        assert self.keys is not None
        assert self.values is not None
        if self.slot is not None:
            self.keys.index_copy_(1, self.slot.row, key_states.flatten(0, 1))
            self.values.index_copy_(1, self.slot.row, value_states.flatten(0, 1))
            return key_states, value_states
        start, self.used = self.used, self.used + key_states.shape[2]
        if self.used > self.keys.shape[1]:
            self.keys, self.values = _grow(self.keys, start, self.used), _grow(self.values, start, self.used)
        self.keys[:, start : self.used] = key_states.flatten(0, 1)
        self.values[:, start : self.used] = value_states.flatten(0, 1)
        return key_states, value_states

    def reserve(self, slot: Slot, tokens: int) -> None:
        """Switch to one row per step, written to the slot, with buffers that have capacity for `tokens` more rows."""
        assert self.keys is not None
        assert self.values is not None
        self.slot = slot
        if self.used + tokens > self.keys.shape[1]:
            needed = self.used + tokens
            self.keys, self.values = _grow(self.keys, self.used, needed), _grow(self.values, self.used, needed)

    def advance(self) -> None:
        """Count the row of a finished step; the cache itself moves the slot on."""
        self.used += 1

    def release(self) -> None:
        """Switch back to appending any number of rows per step."""
        self.slot = None

    def room_left(self) -> int:
        """How many more rows fit into the buffers."""
        assert self.keys is not None
        return self.keys.shape[1] - self.used

    def buffers(self) -> tuple[int, ...]:
        """A fingerprint of the buffers' addresses and capacity; a captured step is valid while it stays the same."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys.data_ptr(), self.values.data_ptr(), self.keys.shape[1]

    def missed(self) -> MissedShares | None:
        """Missed-mass figures since `rewind`; None where they are not measured; one sync."""
        return None

    def rewind(self) -> None:
        """Drop the tokens after the stored ones."""
        self.used = self.first

    def exact_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [Hk, E + new, D] that are always attended; after `reserve` the whole buffers."""
        assert self.keys is not None
        assert self.values is not None
        if self.slot is not None:
            return self.keys, self.values
        return self.keys.narrow(1, 0, self.used), self.values.narrow(1, 0, self.used)

    def get_seq_length(self) -> int:
        return self.stored + self.used - self.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention of the queries [Hq, Q, D] that were appended last; returns [Hq, Q, D]."""
        raise NotImplementedError


def _grow(rows: torch.Tensor, used: int, needed: int) -> torch.Tensor:
    grown = rows.new_zeros(rows.shape[0], max(needed, 2 * rows.shape[1]), rows.shape[2])
    grown[:, :used] = rows[:, :used]
    return grown


class DenseLayer(StoredLayer):
    """Attends to the whole stored context, or to the part of it within a sliding window.

    keys, values [Hk, T, D] are its last rows; the `out_of_sight` tokens before them are outside every query's window.
    `window` must be given for a sliding layer whose steps are to be captured.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, out_of_sight: int = 0, window: int | None = None):
        super().__init__(out_of_sight + keys.shape[1], keys[:, :0], values[:, :0])
        self.stored_keys, self.stored_values, self.out_of_sight = keys, values, out_of_sight
        self.window, self.joined = window, (keys[:, :0], values[:, :0])

    def stored_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [Hk, T, D]."""
        return self.stored_keys, self.stored_values

    def reserve(self, slot: Slot, tokens: int) -> None:
        super().reserve(slot, tokens)
        if self.window is not None:
            self._join()

    def _join(self) -> None:
        """Put stored and new rows into one buffer, so that a window is one run of rows."""
        assert self.keys is not None
        assert self.values is not None
        stored = self.stored_rows()
        seen = stored[0].shape[1]
        if self.joined[0].shape[1] != seen + self.keys.shape[1]:
            keys, values = (torch.cat(pair, 1) for pair in zip(stored, (self.keys, self.values), strict=True))
            self.joined = keys, values
            self.keys, self.values = keys[:, seen:], values[:, seen:]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if self.slot is not None:
            return self._decode_at(self.slot, call)
        if call.query.is_cuda and call.query.shape[1] == 1:
            return self._decode(call)
        keys, values = self.exact_rows()
        queries, Hk = call.query.shape[1], keys.shape[0]
        mask = causal_mask(queries, self.stored + self.used, call.window, keys.device)
        first = min(self._first_seen(call), self.stored)
        in_sight = slice(first - self.out_of_sight, None)
        stored_keys, stored_values = self.stored_rows()
        segments = [
            Segment(stored_keys[:, in_sight], stored_values[:, in_sight], mask[:, first : self.stored]),
            Segment(keys, values, mask[:, self.stored :]),
        ]
        sinks = None if call.sink_logits is None else call.sink_logits.view(Hk, -1)
        grouped = call.query.unflatten(0, (Hk, -1))
        return attend(grouped, segments, call.softmax_scale, call.softcap, sinks).flatten(0, 1)

    def _first_seen(self, call: AttentionCall) -> int:
        """Position of the first token that the first query sees."""
        return 0 if call.window is None else max(0, self.get_seq_length() - call.query.shape[1] - call.window + 1)

    def _decode(self, call: AttentionCall) -> torch.Tensor:
        """One query's attention to the stored rows and a run of new ones, without copying any."""
        first, new = self._first_seen(call), self.used
        seen = min(first, self.stored) - self.out_of_sight
        stored_keys, stored_values = (rows[:, seen:] for rows in self.stored_rows())
        assert self.keys is not None
        assert self.values is not None
        start = torch.full((len(self.keys), 1), max(0, first - self.stored), dtype=torch.int32, device=self.keys.device)
        runs = RunRows(self.keys, self.values, start, new - start, new)
        return _attend_to(call, runs, (stored_keys, stored_values))

    def _decode_at(self, slot: Slot, call: AttentionCall) -> torch.Tensor:
        """The same when the number of new rows is on the device, in the slot."""
        assert self.keys is not None
        assert self.values is not None
        assert call.window == self.window
        count = slot.count.expand(len(self.keys), 1)
        if self.window is None:
            runs = RunRows(self.keys, self.values, torch.zeros_like(count), count, self.keys.shape[1])
            return _attend_to(call, runs, self.stored_rows())
        keys, values = self.joined
        end = count + (keys.shape[1] - self.keys.shape[1])
        start = (end - self.window).clamp(min=0)
        runs = RunRows(keys, values, start, end - start, min(self.window, keys.shape[1]))
        return _attend_to(call, runs, (keys[:, :0], values[:, :0]))


def _attend_to(call: AttentionCall, runs: RunRows, exact: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """One query's attention [Hq, 1, D] to runs of rows and to the rows of `exact`."""
    Hk = len(runs.keys)
    sinks = None if call.sink_logits is None else call.sink_logits.view(Hk, -1)
    query = call.query[:, 0].unflatten(0, (Hk, -1))
    return decode_attention(query, runs, exact, (), call.softmax_scale, call.softcap, sinks).flatten(0, 1)[:, None]


class MappedDenseLayer(DenseLayer):
    """A dense layer that keeps no stored rows in memory: it loads them for each call and frees them after it.

    Args:
        rows: gives keys and values [Hk, tokens - out_of_sight, D].
        nothing: [Hk, 0, D], on their device and of their dtype.
    """

    def __init__(
        self,
        rows: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        nothing: torch.Tensor,
        tokens: int,
        out_of_sight: int = 0,
    ):
        super().__init__(nothing, nothing, out_of_sight)
        self.stored, self.stored_rows = tokens, rows  # type: ignore[method-assign]
