"""Attention of one layer in a step: its inputs, and executors that attend to a selection.

An executor gathers rows, reads rows in place, or runs one fused kernel.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from sparsekv.formats.device import release_pages
from sparsekv.kernels.attention.attention import OwnRows, Segment, attend, attend_once, causal_mask, of_last
from sparsekv.kernels.attention.decode_attention import decode_attention, shared_decode
from sparsekv.kernels.common.hook import AttentionCall, LogitScaling
from sparsekv.kernels.common.kernel_inputs import Centroids, RunRows, ScoredCentroids
from sparsekv.kernels.posting_lists.list_ranks import ExactKeys
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.cache.kv_store import MiddleRows, Pair, PlacedRows
from sparsekv.runtime.cache.stored_layer import DynamicSlot, StoredLayer
from sparsekv.runtime.selection.interface import (
    Budget,
    CentroidSegment,
    Cost,
    InPlace,
    Queries,
    RowSet,
    Selection,
    Selector,
    piece_batch,
)


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


MOST_LOGITS = 2**26
"""Maximum number of float32 logits on rows between sinks and tail, in a piece of queries that attend to all rows.

A piece of a single query may have more.
"""


@dataclass(frozen=True)
class LayerOutput:
    """Attention output [Hk, G, Q, D], and the number of D-sized rows that each KV head read.

    Only rows of the tokens between sinks and tail (the middle) and of the index are counted.

    `rows_read` is a number or [Hk, Q or 1]. Rows that only kernels can count are in `ReadRows.by_kernels` instead, in
    which each count stands for `per_count` rows; 0: kernels counted none.
    """

    output: torch.Tensor
    rows_read: torch.Tensor | float
    per_count: int = 0


@dataclass(frozen=True)
class Fetched:
    """Selected rows, copied to the model's device: R keys and values [Hk, R, D].

    `valid` [Hk, 1, R] bool is False for padding; None: all rows are valid. `log_weights` [Hk, G, Q or 1, R] are added
    to the logits of sampled rows; None: the rows are not sampled. `rest` are centroids of the tokens that were not
    selected. With `rest_attended`, queries attend to these centroids. Otherwise the centroids are used only to estimate
    the missed attention mass. `rows_read` counts rows as in `LayerOutput`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    valid: torch.Tensor | None
    log_weights: torch.Tensor | None
    rest: tuple[CentroidSegment, ...]
    rest_attended: bool
    rows_read: torch.Tensor | float

    def segments(self, step: Step) -> list[Segment]:
        """Return selected rows, exact rows (sinks, tail, new tokens) and, with `rest_attended`, centroids."""
        valid = None if self.valid is None else self.valid[:, None]
        rest = self.rest if self.rest_attended else ()
        return [
            Segment(self.keys, self.values, valid, self.log_weights),
            step.exact,
            *(Segment(part.keys, part.values, bias=part.log_counts[:, None]) for part in rest),
        ]

    def scored_rest(self) -> list[ScoredCentroids] | None:
        """Return the centroids `rest` with their logits, as `attend_once` takes them.

        Returns None if selected rows have padding or weights, or if some centroids have no logits, because
        `attend_once` does not support these cases.
        """
        scored = [part.scored for part in self.rest if part.scored is not None]
        plain = self.valid is None and self.log_weights is None and len(scored) == len(self.rest)
        return scored if plain else None


@dataclass(eq=False)
class GatherExecutor:
    """Copies the selected rows to the model's device and attends to the copy. Works for every placement.

    All queries of a step must share the selection. Allocates the copied rows and the logits.

    Args:
        selector: selects the rows.
        middle: the stored rows between sinks and tail, in the selector's layout.
        search_device: the selector's device.
        mapped: views of the index's files that the selector reads. The pages of the views are released after each
            search.
        fetch_rest: copy the centroids of the unselected tokens for the missed-mass meter, even if queries do not attend
            to them.
    """

    selector: Selector
    middle: MiddleRows
    search_device: torch.device
    mapped: tuple[torch.Tensor, ...] = ()
    fetch_rest: bool = False

    def attend(self, step: Step, budget: Budget) -> LayerOutput:
        """Select within the budget, then attend."""
        return self.attend_to(step, self.select(step.queries, budget), self.selector)

    def attend_to(self, step: Step, selection: Selection, selector: Selector) -> LayerOutput:
        """Attend to a selection, whose rows are in this executor's layout.

        Args:
            selector: the selector that made the selection. It is not `self.selector` if a question selects by another
                method than its answer.
        """
        fetched = self.fetch(selection, step.query.device)
        return LayerOutput(attend(step.query, fetched.segments(step), *step.how), fetched.rows_read)

    def attend_to_everything(self, step: Step) -> torch.Tensor:
        """Attend to all rows; return [Hk, G, Q, D].

        The rows between sinks and tail are read once for all queries, in the order that is fastest to read.
        """
        all_rows = Fetched(*self.middle.in_any_order(), None, None, (), rest_attended=False, rows_read=0.0)
        some = (attend(one.query, all_rows.segments(one), *one.how) for one in pieces_of_all(step, self.middle.used))
        return torch.cat([*some], 2)

    def find(self, queries: Queries, budget: Budget) -> Fetched:
        """Select rows and copy them to the queries' device."""
        return self.fetch(self.select(queries, budget), queries.query.device)

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select rows, on the selector's device."""
        return self.selector.select(queries.to(self.search_device), budget)

    def fetch(self, selection: Selection, device: torch.device) -> Fetched:
        """Copy a selection's rows to the model's device, `device`, and then release the pages of `mapped`.

        The selection's centroids are copied, too, if queries attend to them or if `fetch_rest` is set.
        """
        weights, rest = selection.rows.log_weights, selection.rest
        keys, values, valid = self._rows(selection.rows)
        attended = rest is not None and rest.attended
        segments = () if rest is None or not (attended or self.fetch_rest) else rest.segments()
        found = Fetched(
            keys,
            values,
            None if valid is None else valid.to(device),
            None if weights is None else weights.to(device),
            tuple(part.to(device) for part in segments),
            attended,
            selection.rows_read(),
        )
        for tensor in self.mapped:
            release_pages(tensor)
        return found

    def _rows(self, chosen: RowSet) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the selected keys and values, and a mask of the valid rows.

        If all rows are selected, they are returned in the layout's order, in most placements without a copy.
        """
        if chosen.has_all(self.middle.used):
            return *self.middle.from_row(0), None
        rows, valid = chosen.expand()
        return *self.middle.gather(rows.flatten(1)), valid


def pieces_of_all(step: Step, rows: int) -> Iterator[Step]:
    """Yield the step in pieces of its queries. Each query attends to `rows` rows between sinks and tail.

    A piece has at most `MOST_LOGITS` logits on these rows. If one query has more, the pieces have one query each.
    """
    return step.pieces(max(1, MOST_LOGITS // (step.query.shape[0] * step.query.shape[1] * max(1, rows))))


def attend_in_layout(executor: GatherExecutor, step: Step) -> torch.Tensor:
    """Attend to all rows in the layout's order; return [Hk, G, Q, D].

    The rows are passed as a selection, so that `executor.attend_to` knows the token of each row.
    `attend_to_everything` would not know the order of the rows.
    """
    used = executor.middle.used
    starts = torch.zeros(len(step.query), 1, 1, dtype=torch.int64, device=step.query.device)
    chosen = Selection(RowSet(starts, torch.full_like(starts, used), used, used), Cost(0.0))
    some = (executor.attend_to(one, chosen, executor.selector).output for one in pieces_of_all(step, used))
    return torch.cat([*some], 2)


GatherMaker = Callable[..., GatherExecutor]
"""Function that takes the arguments of `GatherExecutor`, and makes an instance of that class or of a subclass."""


class InPlaceExecutor:
    """Attends for one query with kernels that read the selected rows in place, without a copy of the rows.

    Args:
        selector: selects the rows.
        middle: the stored rows between sinks and tail, in the selector's layout.
        counter: [Hk] int64, to which kernels add counts that the host does not know.
        gather: the fallback for sampled rows, which have weights, and for rows that cannot be read in place.
    """

    def __init__(self, selector: Selector, middle: MiddleRows, counter: torch.Tensor, gather: GatherExecutor):
        self.selector, self.middle, self.counter, self.gather = selector, middle, counter, gather

    def attend(self, step: Step, budget: Budget) -> LayerOutput:
        count, rows = None if step.step_row is None else step.step_row.count, self.middle.in_place()
        exact_keys = ExactKeys(step.keys, count, step.how[2])
        floats = None if rows is None or rows.scales is not None else (rows.keys, rows.values)
        queries = replace(step.queries, in_place=InPlace(self.counter, exact_keys, floats))
        selection = self.selector.select(queries, budget)
        per_count = selection.cost.per_count
        if selection.rows.log_weights is not None or rows is None:
            fetched = self.gather.fetch(selection, step.query.device)
            return LayerOutput(attend(step.query, fetched.segments(step), *step.how), fetched.rows_read, per_count)
        exact, scored = (step.keys, step.values), _scored(selection, step)
        runs = in_place_runs(rows, selection.rows)
        output = decode_attention(step.query[:, :, 0], runs, exact, scored, *step.how, exact_count=count)
        return LayerOutput(output[:, :, None], selection.rows_read(), per_count)


class FusedExecutor:
    """Attends for one query on a CPU. If the selector has a fused kernel, this kernel both selects and attends.

    Without such a kernel, for rows on disk, and in cases that the kernel does not support, the executor gathers the
    selected rows and attends to the copy, if possible by `attend_once`.
    """

    def __init__(self, selector: Selector, middle: MiddleRows, gather: GatherExecutor):
        self.middle, self.gather, kernels = middle, gather, selector.kernels
        self.fused = None if kernels is None else kernels.attend

    def attend(self, step: Step, budget: Budget) -> LayerOutput:
        query, exact = step.query.squeeze(2), (step.keys, step.values)
        if self.fused is not None and (rows := self.middle.in_place()) is not None and rows.scales is None:
            done = self.fused(query, (rows.keys, rows.values), exact, budget, step.how[2])
            if done is not None:
                return LayerOutput(done[0].unsqueeze(2), done[1])
        fetched = self.gather.find(step.queries, budget)
        if (scored := fetched.scored_rest()) is not None:
            output = attend_once(query, ((fetched.keys, fetched.values), exact), scored, *step.how)
            return LayerOutput(output.unsqueeze(2), fetched.rows_read)
        return LayerOutput(attend(step.query, fetched.segments(step), *step.how), fetched.rows_read)


Executor = GatherExecutor | InPlaceExecutor | FusedExecutor
"""Selects rows for a step and attends to them."""


def _scored(selection: Selection, step: Step) -> tuple[ScoredCentroids, ...]:
    """Return the attended centroids of unselected tokens, with their logits for one query."""
    if selection.rest is not None and selection.rest.in_place is not None:
        return selection.rest.in_place
    return tuple(part.scored or _score(part, step) for part in selection.attended_segments())


def _score(part: CentroidSegment, step: Step) -> ScoredCentroids:
    logits = attention_logits(step.query, part.keys, *step.how[:2])[:, :, 0]
    return ScoredCentroids(logits, part.log_counts[:, 0], part.values)


class QuestionExecutor(GatherExecutor):
    """Attends for a question's tokens with kernels that read each row in place, and only once for all tokens.

    Rows are copied, as by the base class, in three cases: the selected rows have sampling weights or differ between
    tokens; the centroids of unselected tokens have several levels or differ between tokens; rows cannot be read in
    place.
    """

    def attend_to(self, step: Step, selection: Selection, selector: Selector) -> LayerOutput:
        rows, parts = self.middle.in_place(), selection.attended_segments()
        plain = selection.rows.log_weights is None and selection.rows.starts.shape[1] == 1
        if rows is None or not plain or len(parts) > 1 or any(part.log_counts.shape[1] > 1 for part in parts):
            return super().attend_to(step, selection, selector)
        seen_by_all, own = _exact_and_own(step)
        centroids = [Centroids(part.keys, part.values, part.log_counts[:, 0]) for part in parts]
        if selection.rows.has_all(self.middle.used):
            runs, seen_by_all = everything(rows, self.middle.used, seen_by_all)
        else:
            runs = _single_rows(rows, selection.rows)
        output = shared_decode(step.query, runs, seen_by_all, centroids, own, *step.how)
        return LayerOutput(output, selection.rows_read())

    def attend_to_everything(self, step: Step) -> torch.Tensor:
        if (rows := self.middle.in_place()) is None:
            return super().attend_to_everything(step)
        seen_by_all, own = _exact_and_own(step)
        runs, seen_by_all = everything(rows, self.middle.used, seen_by_all)
        return shared_decode(step.query, runs, seen_by_all, (), own, *step.how)


def _exact_and_own(step: Step) -> tuple[Pair, OwnRows]:
    """Split a step's exact rows into the rows before its tokens, seen by all tokens, and the rows of its tokens.

    A token attends to its own row and to the rows of earlier tokens of the step.
    """
    before, tokens = step.first - step.unstored, step.query.shape[2]
    new = slice(before, before + tokens)
    return (step.keys[:, :before], step.values[:, :before]), of_last(step.keys[:, new], step.values[:, new], tokens)


def _single_rows(rows: PlacedRows, chosen: RowSet) -> RunRows:
    """Return selected rows as single-row references into keys and values, which kernels read in place."""
    places, valid = chosen.expand()
    used = None if valid is None else valid[:, 0].sum(-1, dtype=torch.int32)
    return RunRows(rows.keys, rows.values, places[:, 0], None, chosen.capacity, used, scales=rows.scales)
