"""Base class of cache layers over a stored context, which store the rows of new tokens."""

from dataclasses import dataclass

import torch

from sparsekv.formats.index.context_rows import Pair
from sparsekv.kernels.common.given_rows import RowLayer
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.kernels.common.rows import store_new_row
from sparsekv.runtime.cache.buffers import ReadRows

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
        if self.step_row is not None:
            key, value = key_states.flatten(0, 1), value_states.flatten(0, 1)
            store_new_row((self.keys, self.values), (key, value), self.step_row.row)
            return key_states, value_states
        start, self.used = self.used, self.used + key_states.shape[2]
        if self.used > self.keys.shape[1]:
            self.keys, self.values = _grow(self.keys, start, self.used), _grow(self.values, start, self.used)
        self.keys[:, start : self.used] = key_states.flatten(0, 1)
        self.values[:, start : self.used] = value_states.flatten(0, 1)
        return key_states, value_states

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
        """Switch back to appending any number of rows per step."""
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
