"""Layers of a cache over a stored context: rows that come after it, and dense attention over all of them."""

from collections.abc import Callable

import torch
from transformers.cache_utils import CacheLayerMixin

from sparsekv.kernels.attention import Segment, attend, causal_mask
from sparsekv.kernels.decode_attention import RunRows, decode_attention
from sparsekv.kernels.hook import AttentionCall

FIRST_NEW_ROWS = 256


class StoredLayer(CacheLayerMixin):
    """One layer whose first tokens are stored: `stored` of them, then the new ones in a buffer that doubles.

    The buffer's first rows may be stored ones that are attended like new ones (`first_keys`, `first_values`
    [Hk, E, D]: sinks and tail of a sparse layer); `rewind` forgets everything after them.
    """

    is_sliding = False

    def __init__(self, stored: int, first_keys: torch.Tensor, first_values: torch.Tensor):
        super().__init__()  # type: ignore[no-untyped-call]
        self.stored, self.first, self.used = stored, first_keys.shape[1], first_keys.shape[1]
        rows = self.first + FIRST_NEW_ROWS
        self.keys = first_keys.new_empty(first_keys.shape[0], rows, first_keys.shape[2])
        self.values = first_values.new_empty(first_values.shape[0], rows, first_values.shape[2])
        self.keys[:, : self.first], self.values[:, : self.first] = first_keys, first_values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the rows were allocated with the stored ones."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new rows [1, Hk, Q, D]; the attention function reads the layer itself, not what is returned."""
        assert self.keys is not None
        assert self.values is not None
        start, self.used = self.used, self.used + key_states.shape[2]
        if self.used > self.keys.shape[1]:
            self.keys, self.values = _grow(self.keys, start, self.used), _grow(self.values, start, self.used)
        self.keys[:, start : self.used] = key_states[0]
        self.values[:, start : self.used] = value_states[0]
        return key_states, value_states

    def rewind(self) -> None:
        """Forget the tokens that came after the stored ones."""
        self.used = self.first

    def exact_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [Hk, E + new, D] that are always attended."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, : self.used], self.values[:, : self.used]

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
    grown = rows.new_empty(rows.shape[0], max(needed, 2 * rows.shape[1]), rows.shape[2])
    grown[:, :used] = rows[:, :used]
    return grown


class DenseLayer(StoredLayer):
    """Attends to the whole stored context, or to what a sliding window leaves of it.

    keys, values [Hk, T, D] are its last rows; the `out_of_sight` tokens before them are in no query's window any more.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, out_of_sight: int = 0):
        super().__init__(out_of_sight + keys.shape[1], keys[:, :0], values[:, :0])
        self.stored_keys, self.stored_values, self.out_of_sight = keys, values, out_of_sight

    def stored_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [Hk, T, D]."""
        return self.stored_keys, self.stored_values

    def attend(self, call: AttentionCall) -> torch.Tensor:
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
        """The first token that the first of the queries sees."""
        return 0 if call.window is None else max(0, self.get_seq_length() - call.query.shape[1] - call.window + 1)

    def _decode(self, call: AttentionCall) -> torch.Tensor:
        """One query's attention, to stored rows and a run of new ones, without a copy of any."""
        first, new = self._first_seen(call), self.used
        seen = min(first, self.stored) - self.out_of_sight
        stored_keys, stored_values = (rows[:, seen:] for rows in self.stored_rows())
        assert self.keys is not None
        assert self.values is not None
        Hk = len(self.keys)
        start = torch.full((Hk, 1), max(0, first - self.stored), dtype=torch.int32, device=call.query.device)
        runs = RunRows(self.keys, self.values, start, new - start, new)
        sinks = None if call.sink_logits is None else call.sink_logits.view(Hk, -1)
        query = call.query[:, 0].unflatten(0, (Hk, -1))
        exact = stored_keys, stored_values
        return decode_attention(query, runs, exact, (), call.softmax_scale, call.softcap, sinks).flatten(0, 1)[:, None]


class MappedDenseLayer(DenseLayer):
    """A dense layer that keeps no row: it asks for them at each call and lets go of them, one layer's at a time.

    Args:
        rows: gives keys and values [Hk, T, D].
    """

    def __init__(self, rows: Callable[[], tuple[torch.Tensor, torch.Tensor]], out_of_sight: int = 0):
        keys, values = rows()
        super().__init__(keys[:, :0].clone(), values[:, :0].clone(), out_of_sight)
        self.stored, self.stored_rows = out_of_sight + keys.shape[1], rows  # type: ignore[method-assign]
