"""A layer's attention policies, and the plan that chooses policies and executors by the selector's parts and config.

A policy selects in the same step or one step ahead, limits the missed mass, or prefills questions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import TypeAlias

import torch

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.index.schema import LayerFacts
from sparsekv.kernels.attention.attention import Segment, attend, attend_with_logsumexp
from sparsekv.runtime.attention.config import DecodeConfig, Dense, Own, QuestionPrefill
from sparsekv.runtime.attention.executors import (
    Executor,
    Fetched,
    FusedExecutor,
    GatherExecutor,
    GatherMaker,
    InPlaceExecutor,
    QuestionExecutor,
    Step,
)
from sparsekv.runtime.attention.guard import Attempt, Guard, MissedMeter, Outcome, missed_share
from sparsekv.runtime.cache.buffers import ReadRows
from sparsekv.runtime.cache.kv_store import MiddleRows, Pair
from sparsekv.runtime.cache.stored_layer import StoredLayer
from sparsekv.runtime.selection.interface import Appending, Budget, Queries, RowSet, Selection, Selector

Search = Callable[[Queries], Fetched]
Pending: TypeAlias = "Future[Fetched]"


@cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="sparsekv-search")


def wait_for_searches() -> None:
    """Wait until all submitted searches of all layers are done."""
    _worker().submit(lambda: None).result()  # the pool's only thread runs searches in order


class Prefetcher:
    """Searches of one layer that run one step ahead: the result of a search is used in the next step.

    Args:
        search: selects and copies rows for one decode step's queries.
    """

    def __init__(self, search: Search):
        self.search = search
        self.pending: Pending | None = None
        self.stream: torch.cuda.Stream | None = None

    def next(self, queries: Queries) -> Fetched:
        """Return the rows found with the previous step's query, and start a search with this step's query.

        The first step, and the first step after `forget`, also search for their own rows, and wait for the result.
        """
        pending, self.pending = self.pending, None  # cleared first, so that a failed search raises only once
        if pending is None:
            wait_for_searches()  # earlier layers' searches run in a thread, and may write to state that layers share
        found = self.search(queries) if pending is None else self._arrived(pending)
        self.pending = _worker().submit(self._run, queries, self._mark(queries.query.device))
        return found

    def forget(self) -> None:
        """Discard the pending search's result, and wait until no layer searches.

        Called before the index changes, before the selections for a question's tokens, and when the layer is rewound.
        """
        self.pending = None
        wait_for_searches()

    def _mark(self, device: torch.device) -> torch.cuda.Event | None:
        if device.type != "cuda":
            return None
        self.stream = self.stream or torch.cuda.Stream(device)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    @torch.inference_mode()
    def _run(self, queries: Queries, ready: torch.cuda.Event | None) -> Fetched:
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            if self.stream is None or ready is None:
                return self.search(queries)
            self.stream.wait_event(ready)
            found = self.search(queries)
            # On return, the queries are freed and their memory may be reused. Therefore this stream must be done
            # reading them.
            self.stream.synchronize()
            return found

    def _arrived(self, pending: Pending) -> Fetched:
        found = pending.result()
        for tensor in tensors_in(found):
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return found


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield every tensor in a dataclass's fields, nested dataclasses and tuples included."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from tensors_in(one)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


class Policy(ABC):
    """Runs one layer's attention in a step, and counts the rows that decode steps read."""

    def __init__(self, middle: MiddleRows, read: ReadRows):
        self.middle, self.read = middle, read

    @abstractmethod
    def attend(self, step: Step) -> torch.Tensor:
        """Return the attention output [Hk, G, Q, D]."""

    def count(self, step: Step, rows: torch.Tensor | float) -> None:
        """If the step is a decode step, add the number of D-sized rows read for each KV head to `read`.

        Rows read for a question's tokens are not counted.

        Args:
            rows: a number for all KV heads, or [Hk, Q or 1].
        """
        if not step.joint:
            self.read.add(rows, self.middle.used)


class Direct(Policy):
    """Selects and attends in the same step."""

    def __init__(self, executor: Executor, budget: Budget, middle: MiddleRows, read: ReadRows):
        super().__init__(middle, read)
        self.executor, self.budget = executor, budget

    def attend(self, step: Step, budget: Budget | None = None) -> torch.Tensor:
        attended = self.executor.attend(step, budget or self.budget)
        self.count(step, attended.rows_read)
        if attended.per_count:
            self.read.per_count = attended.per_count
        return attended.output


class Prefetching(Policy):
    """Attends to the rows found with the previous step's query, and searches with this step's query for the next step.

    The search runs in a thread, at the same time as the attention.
    """

    def __init__(self, prefetcher: Prefetcher, middle: MiddleRows, read: ReadRows):
        super().__init__(middle, read)
        self.prefetcher = prefetcher

    def attend(self, step: Step) -> torch.Tensor:
        fetched = self.prefetcher.next(step.queries)
        self.count(step, fetched.rows_read)
        return attend(step.query, fetched.segments(step), *step.how)


class Metered(Policy):
    """Records the missed mass of each step; a guard, if there is one, limits the missed mass.

    Args:
        gather: selects and copies rows. Its `fetch_rest` must be set, so that it copies centroids, too.
        prefetcher: searches one step ahead for a decode step's rows, at `budget`; None: rows are searched in the same
            step.
        meter: sums up the missed mass, and has the guard.
    """

    def __init__(
        self,
        gather: GatherExecutor,
        prefetcher: Prefetcher | None,
        budget: Budget,
        facts: LayerFacts,
        meter: MissedMeter,
        middle: MiddleRows,
        read: ReadRows,
    ):
        super().__init__(middle, read)
        self.gather, self.prefetcher, self.facts, self.meter = gather, prefetcher, facts, meter
        self.budget = budget

    def attend(self, step: Step, budget: Budget | None = None) -> torch.Tensor:
        outcome = self._outcome(step, budget or self.budget, self.meter.guard)
        self.meter.add(outcome)
        self.count(step, outcome.attempt.rows)
        return outcome.attempt.results[0].transpose(1, 2)

    def _outcome(self, step: Step, budget: Budget, guard: Guard | None) -> Outcome:
        if guard is not None:
            return guard.enforce(
                lambda budget: self._attempt(step, budget),
                lambda heads: self._dense(step, heads),
                budget,
                self.middle.used,
            )
        attempt = self._attempt(step, budget)
        nowhere = torch.zeros_like(attempt.missed, dtype=torch.bool)
        return Outcome(attempt, nowhere, nowhere)

    def _attempt(self, step: Step, budget: Budget) -> Attempt:
        found = self._find(step, budget)
        output, total = attend_with_logsumexp(step.query, found.segments(step), *step.how)
        missed = missed_share(found.rest, step.query, total, self.facts, attended=found.rest_attended)
        rows = torch.as_tensor(found.rows_read, device=missed.device).expand_as(missed)
        return Attempt(missed, rows, (output.transpose(1, 2),))

    def _find(self, step: Step, budget: Budget) -> Fetched:
        if self.prefetcher is not None and not step.joint:
            if budget == self.budget:
                return self.prefetcher.next(step.queries)
            # The searches that this step has started for the next step run in a thread, and may write to state that
            # layers share. Therefore wait for them before searching here.
            wait_for_searches()
        return self.gather.find(step.queries, budget)

    def _dense(self, step: Step, heads: torch.Tensor) -> Attempt:
        """Run dense attention for the heads that are True in `heads` [Hk]; copies the rows that these heads read."""
        some, exact, (scale, softcap, sinks) = heads.nonzero()[:, 0], step.exact, step.how
        middle = Segment(*self.middle.from_row(0, some))
        segments = [middle, Segment(exact.keys[some], exact.values[some], exact.mask)]
        output = torch.zeros_like(step.query)
        output[some] = attend(step.query[some], segments, scale, softcap, None if sinks is None else sinks[some])
        missed = torch.zeros_like(step.query[:, 0, :, 0], dtype=torch.float32)
        return Attempt(missed, torch.full_like(missed, 2.0 * self.middle.used), (output.transpose(1, 2),))


class PiecewiseQuestion(Policy):
    """Attends for a question's tokens in pieces, each with one selection for all its tokens.

    A piece's budget is the budget of one token times the number of the piece's tokens, at most all tokens
    between sinks and tail.

    Args:
        policy: attends for each piece.
        piece: maximum number of tokens in a piece.
    """

    def __init__(self, policy: Direct | Metered, piece: int):
        super().__init__(policy.middle, policy.read)
        self.policy, self.piece = policy, piece

    def attend(self, step: Step) -> torch.Tensor:
        middle, parts = self.middle.used, []
        for some in step.pieces(self.piece):
            tokens = min(middle, self.policy.budget.tokens(middle) * some.query.shape[2])
            parts.append(self.policy.attend(some, Budget(tokens)))
        return torch.cat(parts, 2)


class ObservedQuestion(Policy):
    """Base class of policies that attend for a question's tokens without the selector of the answer's tokens.

    The answer's selector still receives the queries of a question's tokens if it has `ConversationState.observe`.
    """

    def __init__(self, gather: GatherExecutor, middle: MiddleRows, read: ReadRows):
        super().__init__(middle, read)
        self.gather = gather
        conversation = gather.selector.conversation
        self.observe = None if conversation is None else conversation.observe

    def attend(self, step: Step) -> torch.Tensor:
        if self.observe is not None:
            self.observe(step.queries.to(self.gather.search_device))
        return self.attend_observed(step)

    @abstractmethod
    def attend_observed(self, step: Step) -> torch.Tensor:
        """Return the attention output [Hk, G, Q, D]."""


class DenseQuestion(ObservedQuestion):
    """Lets a question's tokens attend to all rows."""

    def attend_observed(self, step: Step) -> torch.Tensor:
        return self.gather.attend_to_everything(step)


class QuestionSearch:
    """Selects one layer's rows for a chunk of a question, as row indices in the layout of the answer's selector.

    Args:
        prefill: the question's method, budget and chunk size.
        selector: selector of the question's method.
        device: the selector's device.
        layout: the layout of the answer's selector, [Hk, M] int64: the middle position of each stored row. None: rows
            are stored in order of position.
    """

    def __init__(self, prefill: QuestionPrefill, selector: Selector, device: torch.device, layout: torch.Tensor | None):
        self.selector, self.budget, self.chunk_size = selector, prefill.budget, prefill.chunk_size
        self.device, self.rows_of = device, None if layout is None else layout.argsort(-1).to(device)

    def select(self, queries: Queries) -> Selection:
        """Return one selection for all queries [Hk, G, Q, D] of a chunk."""
        chosen = self.selector.select(queries.to(self.device), self.budget)
        rows, valid = chosen.rows.expand()
        for order in (self.selector.layout, self.rows_of):
            rows = rows if order is None else order[:, None].gather(-1, rows)
        lengths = None if valid is None else valid.long()
        return replace(chosen, rows=RowSet(rows, lengths, chosen.rows.capacity, log_weights=chosen.rows.log_weights))


class ChunkedQuestion(ObservedQuestion):
    """Attends for a question's tokens chunk by chunk, with a separate search for each chunk.

    Args:
        search: selects the rows of a chunk, by the question's own method.
        gather: attends to rows in the layout of the answer's selector, in place or in a copy.
    """

    def __init__(self, search: QuestionSearch, gather: GatherExecutor, middle: MiddleRows, read: ReadRows):
        super().__init__(gather, middle, read)
        self.search = search

    def attend_observed(self, step: Step) -> torch.Tensor:
        parts = []
        for piece in step.pieces(self.search.chunk_size):
            found = self.search.select(piece.queries)
            parts.append(self.gather.attend_to(piece, found, self.search.selector).output)
        return torch.cat(parts, 2)


@dataclass
class Appender:
    """Moves a layer's oldest tokens after the sinks to the indexed rows (the middle), from which the selector chooses.

    Before the move, these tokens are among the exact rows, to which every query attends: sinks, tail and new tokens.

    `torn` is True while rows move. If a move is interrupted, `torn` stays True, because index and rows may disagree.

    Args:
        sinks: number of sinks, which are the first exact rows and never move.
        device: the selector's device.
        prefetcher: its pending search is discarded at each append, because the index changes; None: nothing is
            prefetched.
    """

    index: Appending
    middle: MiddleRows
    sinks: int
    read: ReadRows
    device: torch.device
    prefetcher: Prefetcher | None
    torn: bool = False

    def append_due(self, layer: StoredLayer) -> None:
        """Append the oldest rows after the sinks to the index, in chunks of `index.size` rows.

        The newest full chunk and the rows after it stay exact. With fewer than two full chunks, nothing is appended.
        """
        size, start = self.index.size, self.sinks
        if layer.used - start < 2 * size:
            return
        self.torn = True
        keys, values = layer.exact_rows()
        moved = ((layer.used - start) // size - 1) * size
        for first in range(start, start + moved, size):
            self._append((keys[:, first : first + size], values[:, first : first + size]))
        for rows in (keys, values):
            rows[:, start : layer.used - moved] = rows[:, start + moved :].clone()
        layer.used, layer.stored = layer.used - moved, layer.stored + moved
        self.torn = False

    def _append(self, new: Pair) -> None:
        if self.prefetcher is not None:
            self.prefetcher.forget()
        start = self.index.open_row()
        keys, values = (torch.cat(pair, 1) for pair in zip(self.middle.from_row(start), new, strict=True))
        appended = self.index.append(keys.to(self.device), values.to(self.device))
        self.middle.rewrite(start, new, appended.order)
        self.read.known += len(keys) * (appended.index_rows + 2 * keys.shape[1])

    @torch.inference_mode()
    def remove_appended(self, layer: StoredLayer, tokens: int, exact: Pair) -> None:
        """Undo all appends, if there were any: restore the stored index, the middle and the layer's exact rows.

        Args:
            tokens: number of tokens of the stored context.
            exact: keys and values [Hk, E, D] of sinks and tail.

        Raises:
            SparsekvError: an earlier call or an append was interrupted before it finished.
        """
        # This method runs in inference mode, because buffers that grew during decoding are inference tensors, which can
        # be written only in inference mode.
        if self.torn:
            raise SparsekvError(
                "an answer was interrupted while its tokens moved into the index, which cannot be undone; open a "
                "new session with `index.asker()`"
            )
        self.torn = True
        order = self.index.remove()
        if order is not None:
            self.middle.rewrite(self.index.open_row(), None, order)
            layer.stored = tokens
            for rows, first in zip(layer.exact_rows(), exact, strict=True):
                rows.copy_(first)
        self.torn = False


@dataclass(frozen=True)
class LayerParts:
    """Inputs of `plan_layer` for one layer: its selector, its rows, and their devices.

    Args:
        number: index of the layer in its model.
        sinks: number of tokens before the middle, whose rows are always attended.
        heads: number of KV heads, Hk.
        device: the model's device.
        search_device: the selector's device.
        mapped: views of the index's files that the selector reads. The pages of the views are released after each
            search.
        question: the selector for a question's tokens, if the config has a separate method for questions.
        gather_maker: makes an executor that copies selected rows together; every step then uses it. None: executors
            that read the rows in place are used where possible.
    """

    number: int
    selector: Selector
    middle: MiddleRows
    facts: LayerFacts
    sinks: int
    heads: int
    device: torch.device
    search_device: torch.device
    mapped: tuple[torch.Tensor, ...] = ()
    question: QuestionSearch | None = None
    gather_maker: GatherMaker | None = None


@dataclass(frozen=True)
class LayerPlan:
    """One layer's policies and the objects they share.

    `decode` runs decode steps, and `prefill` runs a question's tokens. `captured` runs decode steps while a
    `DynamicSlot` on the device has the new row's index, as in a CUDA graph. With `own_prefill`, the question's tokens
    select by the same method and budget as the answer's tokens. With `steps_alike`, a CUDA graph of one step can be
    replayed for all later steps, as far as policies, placement and appender are concerned. The selector may still
    prevent the replay. `dense_from` is as in `DecodeConfig`.
    """

    selector: Selector
    middle: MiddleRows
    read: ReadRows
    budget: Budget
    decode: Policy
    captured: Policy
    prefill: Policy
    gather: GatherExecutor
    appender: Appender | None
    prefetcher: Prefetcher | None
    meter: MissedMeter | None
    own_prefill: bool
    steps_alike: bool
    dense_from: int | None

    @property
    def prefills_densely(self) -> bool:
        """Whether a question's tokens attend to all rows."""
        return isinstance(self.prefill, DenseQuestion)

    @property
    def shareable(self) -> bool:
        """Whether several sequences can share a step.

        They can if nothing is appended, prefetched or measured, and if the selector's decode steps launch the same
        kernels (`Selector.graph_state`).
        """
        alone = self.appender is not None or self.prefetcher is not None or self.meter is not None
        return not alone and self.selector.graph_state() is not None

    def graph_state(self) -> int | None:
        """Return a number that changes when a step must be captured again; None: steps cannot be replayed."""
        return self.selector.graph_state() if self.steps_alike else None


def plan_layer(layer: LayerParts, config: DecodeConfig) -> LayerPlan:
    """Choose how one layer attends, from its selector's capabilities, the placement of its rows, and the config."""
    selector, middle = layer.selector, layer.middle
    read, budget = ReadRows(layer.heads, layer.device), config.budget_of(layer.number)
    meter = MissedMeter(config.guard) if config.measured else None
    make = layer.gather_maker or GatherExecutor
    gather = make(selector, middle, layer.search_device, layer.mapped, fetch_rest=meter is not None)
    prefetcher = Prefetcher(lambda queries: gather.find(queries, budget)) if config.ahead else None
    appender = None
    if (index := selector.append) is not None:
        appender = Appender(index, middle, layer.sinks, read, layer.search_device, prefetcher)
    measured = None if meter is None else Metered(gather, prefetcher, budget, layer.facts, meter, middle, read)
    # A plain step only selects and attends: nothing is measured or prefetched, and there is no custom executor.
    plain = measured is None and prefetcher is None and layer.gather_maker is None
    captured: Policy
    if measured is not None:
        captured = measured
    elif prefetcher is not None:
        captured = Prefetching(prefetcher, middle, read)
    else:
        in_place = plain and middle.reachable
        executor = InPlaceExecutor(selector, middle, read.by_kernels, gather) if in_place else gather
        captured = Direct(executor, budget, middle, read)
    fused = plain and layer.device.type != "cuda"
    asking = gather
    if layer.device.type == "cuda" and measured is None and layer.gather_maker is None and middle.reachable:
        asking = QuestionExecutor(selector, middle, layer.search_device)
    return LayerPlan(
        selector=selector,
        middle=middle,
        read=read,
        budget=budget,
        decode=Direct(FusedExecutor(selector, middle, gather), budget, middle, read) if fused else captured,
        captured=captured,
        prefill=_prefill(layer, config, asking, measured or Direct(asking, budget, middle, read)),
        gather=gather,
        appender=appender,
        prefetcher=prefetcher,
        meter=meter,
        own_prefill=isinstance(config.question, Own),
        steps_alike=plain and middle.reachable and appender is None,
        dense_from=config.dense_from,
    )


def _prefill(layer: LayerParts, config: DecodeConfig, asking: GatherExecutor, within: Direct | Metered) -> Policy:
    """Choose the policy of a question's tokens.

    Args:
        asking: executor that attends to rows for a question's tokens.
        within: policy that selects by the layer's own selector and attends.
    """
    if isinstance(config.question, Dense):
        return DenseQuestion(asking, layer.middle, within.read)
    if layer.question is not None:
        return ChunkedQuestion(layer.question, asking, layer.middle, within.read)
    if layer.selector.question_piece is not None:
        return PiecewiseQuestion(within, layer.selector.question_piece)
    return within
