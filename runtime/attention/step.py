"""Inputs of one layer's attention in a step: queries, rows that are attended exactly, and selected rows in place."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from sparsekv.kernels.attention.attention import Segment, causal_mask
from sparsekv.kernels.attention.types import RunRows
from sparsekv.kernels.common.hook import AttentionCall, LogitScaling
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.cache.kv_store import Pair, PlacedRows
from sparsekv.runtime.cache.stored_layer import DynamicSlot, StoredLayer
from sparsekv.runtime.selection.interface import Queries, RowSet, piece_batch


def everything(rows: PlacedRows, used: int, exact: Pair) -> tuple[RunRows, Pair]:
    """Return the arguments (runs, exact rows) with which `shared_decode` attends to all rows.

    All rows are the first `used` rows of `rows`, and the rows `exact`. `shared_decode` reads runs through row indices,
    and exact rows without indices, which is faster. Therefore the many rows of `rows` are passed as exact rows, and the
    few rows `exact` as runs. Only runs can be int8. Therefore, if `rows` are int8, `rows` are passed as runs, and
    `exact` as exact rows. Allocates the row indices of the runs.
    """
    if rows.scales is not None:
        return rows.first(used), exact
    return PlacedRows(*exact).first(exact[0].shape[1]), (rows.keys[:, :used], rows.values[:, :used])


def in_place_runs(rows: PlacedRows, chosen: RowSet) -> RunRows:
    """Return selected rows as references into `rows`, for one query or for several queries that share the rows."""
    keys, values = rows.keys, rows.values
    if chosen.indices is not None:
        # `used` is None if all slots are used, so that kernels need not read the count.
        used = None if chosen.total == chosen.capacity else chosen.indices.used
        rest = chosen.capacity, used, chosen.indices.queue
        return RunRows(keys, values, chosen.indices.rows, None, *rest, scales=rows.scales)
    lengths = chosen.run_lengths
    ends = None if lengths is None else lengths.cumsum(-1, dtype=torch.int32)[:, 0]
    return RunRows(keys, values, chosen.starts[:, 0], ends, chosen.capacity, scales=rows.scales)


@dataclass(frozen=True)
class Step:
    """Inputs of one layer's attention for the Q tokens that the layer appended last.

    Attributes:
        query: [Hk, G, Q, D], the tokens' queries.
        keys, values: [Hk, E, D], the exact rows: sinks, tail and new tokens.
        mask: [Q, E] bool, True where a query attends to an exact row; None: each query attends to all valid rows.
        first: position of the first of the Q tokens.
        step_row: the number of valid exact rows, and the index of the token's row, on the device. Set only for decode
            steps that a CUDA graph may replay, because numbers of the host would be constants of the graph.
        unstored: the position of a new token minus its row index in `keys`.
        joint: whether the tokens belong to a question and share one selection.
        how: the scale, soft cap and sinks of the logits.
        batch: as in `Queries`.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None
    first: int
    step_row: DynamicSlot | None
    unstored: int
    joint: bool
    how: LogitScaling
    batch: int = 0

    @cached_property
    def queries(self) -> Queries:
        """The selector's input for this step."""
        return Queries(self.query, self._positions, self._exact_logsumexp, self.joint, self.batch)

    @cached_property
    def exact(self) -> Segment:
        """The exact rows: sinks, tail and new tokens, which are attended in every step."""
        return Segment(self.keys, self.values, self._seen())

    def pieces(self, size: int) -> Iterator["Step"]:
        """Yield the step in pieces of at most `size` queries; each piece gets one selection."""
        for start in range(0, self.query.shape[2], size):
            piece = slice(start, start + size)
            mask = None if self.mask is None else self.mask[piece]
            batch = self.batch + piece_batch(start)
            yield replace(self, query=self.query[:, :, piece], mask=mask, first=self.first + start, batch=batch)

    def _seen(self) -> torch.Tensor | None:
        if self.step_row is None:
            return self.mask
        return torch.arange(self.keys.shape[1], device=self.keys.device)[None] < self.step_row.count

    def _exact_logsumexp(self) -> torch.Tensor:
        logits, seen, sinks = attention_logits(self.query, self.keys, *self.how[:2]), self._seen(), self.how[2]
        total = (logits if seen is None else logits.masked_fill(~seen, -torch.inf)).logsumexp(-1)
        return total if sinks is None else torch.logaddexp(total, sinks[..., None].float())

    def _positions(self) -> torch.Tensor:
        if self.step_row is not None:
            return self.step_row.row + self.unstored
        return torch.arange(self.first, self.first + self.query.shape[2], device=self.keys.device)


def step_of(layer: StoredLayer, call: AttentionCall) -> Step:
    """Return the step of an attention call. The layer must have appended the keys and values of the call's Q tokens."""
    keys, values = layer.exact_rows()
    queries = call.query.shape[1]
    return Step(
        query=call.grouped,
        keys=keys,
        values=values,
        mask=None if queries == 1 else causal_mask(queries, layer.used, None, keys.device),
        first=layer.get_seq_length() - queries,
        step_row=layer.step_row,
        unstored=layer.stored - layer.first,
        joint=layer.prefills(queries),
        how=call.scaling,
    )
