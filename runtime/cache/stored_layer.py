"""Cache layers over a stored context: the base class, which stores the rows of new tokens, and dense layers.

Dense layers attend to the whole stored context or to a sliding window. Other layers have recurrent and convolution
states after the context, with copies for the sequences of a batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from sparsekv.formats.index.context_rows import Pair
from sparsekv.kernels.attention.attention import Segment, attend, attend_once, causal_mask, of_last
from sparsekv.kernels.attention.decode_attention import decode_attention, shared_decode
from sparsekv.kernels.common.given_rows import RowLayer
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.kernels.common.kernel_inputs import RunRows
from sparsekv.kernels.common.row_operations import store_new_row
from sparsekv.kernels.common.states import LayerKinds, State, hold_state
from sparsekv.runtime.cache.buffers import ReadRows
from sparsekv.runtime.cache.kv_store import placed, side_by_side, units_of


@dataclass(frozen=True)
class DocumentState:
    """State after a stored context, from which every answer begins; empty if no layer of the model keeps a state.

    Args:
        stored: tensors [1, ...] on the model's device, which are never changed.
    """

    kinds: LayerKinds
    stored: State = field(default_factory=dict)

    def cache_layers(self, rows: Sequence[CacheLayerMixin]) -> list[Any]:
        """Make all layers of a cache, given its layers with rows; layers with a state get copies of the state."""
        return self.kinds.cache_layers(rows, self.stored)

    def copy_to(self, live: Mapping[str, torch.Tensor]) -> None:
        """Copy the state to the tensors `live`, in place, because CUDA graphs of steps refer to these tensors."""
        for name, tensor in self.stored.items():
            live[name].copy_(tensor)


class SlotStates:
    """States of S sequences that decode over one stored context: tensors [S, ...].

    The model's pass over a question updates views of the question's slot. A decode step updates copies of the states of
    its sequences, and `end_step` writes the copies back to the slots.
    """

    def __init__(self, document: DocumentState, slots: int):
        self.document = document
        self.slots = {name: one.expand(slots, *one.shape[1:]).clone() for name, one in document.stored.items()}
        self._step: tuple[State, torch.Tensor] | None = None

    def begin_question(self, layers: Sequence[object], slot: int, *, continued: bool) -> None:
        """Make a cache's layers update the states of the sequence in `slot` in place.

        Args:
            layers: the cache's layers.
            continued: the slot has the states after the question's first tokens, and keeps them. Otherwise it gets the
                states after the stored context.
        """
        views = self._views(slot)
        if not continued:
            self.document.copy_to(views)
        hold_state(layers, views)

    def copied(self, slot: int) -> State:
        """Return copies [1, ...] of the states of the sequence in a slot."""
        return {name: one.clone() for name, one in self._views(slot).items()}

    def put(self, slot: int, state: State) -> None:
        """Overwrite the states of the sequence in a slot."""
        for name, view in self._views(slot).items():
            view.copy_(state[name])

    def _views(self, slot: int) -> State:
        return {name: of_slots[slot : slot + 1] for name, of_slots in self.slots.items()}

    def begin_step(self, layers: Sequence[object], slots: torch.Tensor) -> None:
        """Make a cache's layers update copies of the states of the sequences in `slots` [B]."""
        copies = {name: of_slots[slots] for name, of_slots in self.slots.items()}
        self._step = copies, slots
        hold_state(layers, copies)

    def end_step(self) -> None:
        """Write the states of a decode step back to its sequences' slots. A slot may be repeated with equal states."""
        assert self._step is not None
        copies, slots = self._step
        for name, tensor in copies.items():
            self.slots[name].index_copy_(0, slots, tensor)


FIRST_NEW_ROWS = 64
MissedShares = tuple[float, float, float]
"""Mean missed mass, share of heads over the guard's limit at the first budget, share of heads that fell back to dense
attention."""


@dataclass(frozen=True)
class DynamicSlot:
    """Index `row` [1] int64 at which a decode step writes its row, and `count` [1] int32 of rows including this row.

    Both tensors are on the device, so that each replay of a step's CUDA graph writes to another row.
    """

    row: torch.Tensor
    count: torch.Tensor


class StoredLayer(RowLayer):
    """One layer with `stored` stored tokens, and a buffer for new tokens that at least doubles when it is full.

    The buffer begins with the rows `first_keys` and `first_values` [Hk, E, D]: sinks and tail of a sparse layer, or no
    rows. Queries attend to these stored rows as to new rows. `rewind` drops all rows after them. The sequences of a
    batch are concatenated along the heads.
    """

    keys: torch.Tensor
    values: torch.Tensor
    capturable = True
    """Whether a CUDA graph of one decode step can be replayed for all later steps."""

    read: ReadRows | None = None
    """Counter of the rows that decode steps read; None for a dense layer, which reads all rows."""

    def __init__(self, stored: int, first_keys: torch.Tensor, first_values: torch.Tensor):
        super().__init__()  # type: ignore[no-untyped-call]
        self.stored, self.first, self.used = stored, first_keys.shape[1], first_keys.shape[1]
        self.step_row: DynamicSlot | None = None
        self.prompt_tokens = 0
        rows = self.first + FIRST_NEW_ROWS
        # Initialised with zeros, because rows that are masked out must still be finite.
        self.keys = first_keys.new_zeros(first_keys.shape[0], rows, first_keys.shape[2])
        self.values = first_values.new_zeros(first_values.shape[0], rows, first_values.shape[2])
        self.keys[:, : self.first], self.values[:, : self.first] = first_keys, first_values
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> Pair:
        """Append new rows [batch, Hk, Q, D]; the attention function reads the layer itself, not the returned tensors.

        Between `reserve` and `release`, each call appends one row, which `advance` then counts.
        """
        self.append(key_states.flatten(0, 1), value_states.flatten(0, 1))
        return key_states, value_states

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append new rows [Hk, Q, D], as `update` does."""
        if self.step_row is not None:
            store_new_row((self.keys, self.values), (keys, values), self.step_row.row)
            return
        start, tokens = self.used, keys.shape[1]
        self.used = start + tokens
        if self.used > self.keys.shape[1]:
            self.keys, self.values = _grow(self.keys, start, self.used), _grow(self.values, start, self.used)
        self.keys.narrow(1, start, tokens).copy_(keys)
        self.values.narrow(1, start, tokens).copy_(values)

    def reserve(self, step_row: DynamicSlot, tokens: int) -> None:
        """Switch to appending one row per step, at `step_row`, with buffer capacity for `tokens` more rows."""
        self.step_row = step_row
        self.make_room(self.used + tokens)

    def make_room(self, rows: int) -> None:
        """Grow the buffers to at least `rows` rows."""
        if rows > self.keys.shape[1]:
            self.keys, self.values = _grow(self.keys, self.used, rows), _grow(self.values, self.used, rows)

    def advance(self) -> None:
        """Count the row of a finished step. The caller increments the numbers in `step_row`."""
        self.used += 1

    def release(self) -> None:
        """End the mode of one row per step (`reserve`): steps may append any number of rows again."""
        self.step_row = None

    def room_left(self) -> int:
        """Return the number of rows that still fit into the buffers."""
        return self.keys.shape[1] - self.used

    def buffers(self) -> tuple[int, ...]:
        """Return the buffers' addresses and capacity; a CUDA graph of a step is valid until one of them changes."""
        return self.keys.data_ptr(), self.values.data_ptr(), self.keys.shape[1]

    def expect_prompt(self, tokens: int) -> None:
        """Treat the sequence's first `tokens` tokens, stored tokens included, as a prompt that is prefilled.

        Prompt tokens may be appended in calls of any length.
        """
        self.prompt_tokens = tokens

    def prefills(self, tokens: int) -> bool:
        """Whether the last `tokens` appended tokens are prefilled; otherwise they are a decode step.

        Tokens of the expected prompt are prefilled, and so are several tokens appended at once. Between `reserve` and
        `release`, every token is a decode step.
        """
        return self.step_row is None and (tokens > 1 or self.get_seq_length() <= self.prompt_tokens)

    def missed(self) -> MissedShares | None:
        """Return the missed-mass statistics since counting began, with one sync; None without a measurement."""
        return None

    def start_counting(self) -> None:
        """Reset the layer's counts; the base class has none."""

    def rewind(self) -> None:
        """Drop the tokens after the stored tokens; no prompt is expected afterwards."""
        self.used, self.prompt_tokens = self.first, 0

    def count_written(self, tokens: int) -> None:
        """Count the rows of `tokens` tokens that other code has written to the buffers, after the counted rows."""
        self.used += tokens

    def drop(self, tokens: int) -> None:
        """Drop the rows of the last `tokens` appended tokens."""
        self.used -= tokens

    def exact_rows(self) -> Pair:
        """Return the keys and values [Hk, E + new, D] that are always attended; after `reserve`, the whole buffers."""
        if self.step_row is not None:
            return self.keys, self.values
        return self.keys.narrow(1, 0, self.used), self.values.narrow(1, 0, self.used)

    def get_seq_length(self) -> int:
        return self.stored + self.used - self.first

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attend for the queries [Hq, Q, D] of the tokens that were appended last; return [Hq, Q, D]."""
        raise NotImplementedError


def _grow(rows: torch.Tensor, used: int, needed: int) -> torch.Tensor:
    grown = rows.new_zeros(rows.shape[0], max(needed, 2 * rows.shape[1]), rows.shape[2])
    grown[:, :used] = rows[:, :used]
    return grown


class DenseLayer(StoredLayer):
    """Attends to the whole stored context and to new tokens, or only to the tokens within a sliding window.

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
        """Attend for one query to stored and new rows, or only to those within the window, without copies of rows."""
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
