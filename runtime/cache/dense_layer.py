"""Cache layers that attend to the whole stored context or to a sliding window."""

from collections.abc import Mapping
from functools import cached_property

import torch

from sparsekv.kernels.attention.attention import Segment, attend, attend_once, causal_mask, of_last
from sparsekv.kernels.attention.decode_attention import decode_attention, shared_decode
from sparsekv.kernels.attention.types import RunRows
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.cache.kv_store import Pair, placed, side_by_side, units_of
from sparsekv.runtime.cache.stored_layer import DynamicSlot, StoredLayer


class DenseLayer(StoredLayer):
    """Attends to the whole stored context and to new tokens, or to those of them within a sliding window.

    Args:
        keys, values: [Hk, T, D], the last T rows of the stored context.
        out_of_sight: number of tokens before these rows, which are outside every query's window.
        window: length of the sliding window, needed only for steps that a CUDA graph replays; None: no window.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, out_of_sight: int = 0, window: int | None = None):
        super().__init__(out_of_sight + keys.shape[1], keys[:, :0], values[:, :0])
        self.stored_keys, self.stored_values, self.out_of_sight = keys, values, out_of_sight
        self.window, self.joined = window, (keys[:, :0], values[:, :0])

    def stored_rows(self) -> Pair:
        """Return the stored keys and values [Hk, T, D], without new rows."""
        return self.stored_keys, self.stored_values

    def shared(self) -> tuple[RunRows, Pair]:
        """Return the stored rows as arguments of `shared_decode`: runs, and exact rows for all queries."""
        keys, values = self.stored_rows()
        nothing = torch.empty(len(keys), 0, dtype=torch.int32, device=keys.device)
        return RunRows(keys, keys, nothing, None, 0), (keys, values)

    def reserve(self, step_row: DynamicSlot, tokens: int) -> None:
        super().reserve(step_row, tokens)
        if self.window is not None:
            self._join()

    def _join(self) -> None:
        """Make sure that stored and new rows are in one buffer, so that a window is one run of consecutive rows.

        The rows are copied if there is no such buffer, or if it has become too small.
        """
        stored = self.stored_rows()
        seen = stored[0].shape[1]
        if self.joined[0].shape[1] != seen + self.keys.shape[1]:
            keys, values = (torch.cat(pair, 1) for pair in zip(stored, (self.keys, self.values), strict=True))
            self.joined = keys, values
            self.keys, self.values = keys[:, seen:], values[:, seen:]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if self.step_row is not None:
            return self._decode_at(self.step_row, call)
        if call.query.shape[1] == 1:
            return self._decode(call) if call.query.is_cuda else self.attend_once(call, self.exact_rows())
        return self.attend_before(call, self.exact_rows())

    def attend_before(self, call: AttentionCall, new: Pair) -> torch.Tensor:
        """Attend causally to the stored rows and to new rows [Hk, T, D]; return [Hq, Q, D].

        The last Q new rows are those of the queries' tokens. On a GPU without a window, no rows are copied. On a CPU,
        or with a window, the logits of all rows to which a query attends are allocated.
        """
        keys, values = new
        if call.window is None and keys.is_cuda:
            return self.attend_in_place(call, new)
        queries, tokens = call.query.shape[1], self.stored + keys.shape[1]
        mask = causal_mask(queries, tokens, call.window, keys.device)
        first = 0 if call.window is None else min(max(0, tokens - queries - call.window + 1), self.stored)
        in_sight = slice(first - self.out_of_sight, None)
        stored_keys, stored_values = self.stored_rows()
        segments = [
            Segment(stored_keys[:, in_sight], stored_values[:, in_sight], mask[:, first : self.stored]),
            Segment(keys, values, mask[:, self.stored :]),
        ]
        return attend(call.grouped, segments, *call.scaling).flatten(0, 1)

    def attend_in_place(self, call: AttentionCall, new: Pair) -> torch.Tensor:
        """Attend like `attend_before`, without a window, by a kernel that reads all rows in place."""
        (runs, exact), own = self.shared(), of_last(*new, call.query.shape[1])
        return shared_decode(call.grouped, runs, exact, (), own, *call.scaling).flatten(0, 1)

    def attend_once(self, call: AttentionCall, new_rows: Pair) -> torch.Tensor:
        """Attend for one query on a CPU to stored rows and to new rows [Hk, T, D]; the last new row is the query's own.

        Returns [Hq, 1, D]. The query attends to all rows or, with a window, to the last `window` rows. So no mask is
        needed.
        """
        keys, values = new_rows
        first = 0 if call.window is None else max(0, self.stored + keys.shape[1] - call.window)
        seen, new = min(first, self.stored) - self.out_of_sight, max(0, first - self.stored)
        stored_keys, stored_values = self.stored_rows()
        rows = [(stored_keys[:, seen:], stored_values[:, seen:]), (keys[:, new:], values[:, new:])]
        return attend_once(call.grouped[:, :, 0], rows, (), *call.scaling).flatten(0, 1)[:, None]

    def _first_seen(self, call: AttentionCall) -> int:
        """Return the position of the first token to which the first query attends."""
        return 0 if call.window is None else max(0, self.get_seq_length() - call.query.shape[1] - call.window + 1)

    def _decode(self, call: AttentionCall) -> torch.Tensor:
        """Attend for one query to stored and new rows, with a window only to the last ones, without copies of rows."""
        first, new = self._first_seen(call), self.used
        seen = min(first, self.stored) - self.out_of_sight
        stored_keys, stored_values = (rows[:, seen:] for rows in self.stored_rows())
        start = torch.full((len(self.keys), 1), max(0, first - self.stored), dtype=torch.int32, device=self.keys.device)
        runs = RunRows(self.keys, self.values, start, new - start, new)
        return attend_to(call, runs, (stored_keys, stored_values))

    def _decode_at(self, step_row: DynamicSlot, call: AttentionCall) -> torch.Tensor:
        """Attend like `_decode`, with the number of new rows on the device, in `step_row`."""
        assert call.window == self.window
        count = step_row.count.expand(len(self.keys), 1)
        if self.window is None:
            runs = RunRows(self.keys, self.values, torch.zeros_like(count), count, self.keys.shape[1])
            return attend_to(call, runs, self.stored_rows())
        keys, values = self.joined
        end = count + (keys.shape[1] - self.keys.shape[1])
        start = (end - self.window).clamp(min=0)
        runs = RunRows(keys, values, start, end - start, min(self.window, keys.shape[1]))
        return attend_to(call, runs, (keys[:, :0], values[:, :0]))


def attend_to(call: AttentionCall, runs: RunRows, exact: Pair, exact_count: torch.Tensor | None = None) -> torch.Tensor:
    """Attend for one query to runs of rows and to the rows `exact`; return [Hq, 1, D].

    Args:
        exact_count: number of the first rows of `exact` to attend to, on the device; None: all rows.
    """
    output = decode_attention(call.grouped[:, :, 0], runs, exact, (), *call.scaling, exact_count=exact_count)
    return output.flatten(0, 1)[:, None]


class DenseLayerIn8Bits(DenseLayer):
    """Attends to the whole stored context, without a window; kernels read its int8 rows in place, on any device.

    Args:
        numbers: the tensors of a context file in int8, on the model's device.
        nothing: an empty tensor [Hk, 0, D] on the model's device and in the model's dtype.
    """

    def __init__(self, numbers: Mapping[str, torch.Tensor], nothing: torch.Tensor):
        super().__init__(nothing, nothing)
        self.stored, self._numbers, self._nothing = numbers["keys"].shape[1], numbers, nothing

    @cached_property
    def _runs(self) -> RunRows:
        rows = placed(side_by_side(self._numbers), self._numbers, units_of(self._numbers["value_scales"]))
        return rows.first(self.stored)

    def shared(self) -> tuple[RunRows, Pair]:
        return self._runs, (self._nothing, self._nothing)

    def attend_before(self, call: AttentionCall, new: Pair) -> torch.Tensor:
        return self.attend_in_place(call, new)

    def attend_once(self, call: AttentionCall, new_rows: Pair) -> torch.Tensor:
        return attend_to(call, self._runs, new_rows)

    def _decode(self, call: AttentionCall) -> torch.Tensor:
        return attend_to(call, self._runs, self.exact_rows())

    def _decode_at(self, step_row: DynamicSlot, call: AttentionCall) -> torch.Tensor:
        return attend_to(call, self._runs, (self.keys, self.values), step_row.count)
