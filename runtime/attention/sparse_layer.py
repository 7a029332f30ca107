"""Cache layers that attend to selected rows of a stored context, for one sequence or a batch."""

from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from functools import partial

import torch

from sparsekv.formats.index.schema import Split
from sparsekv.kernels.attention.attention import OwnRows, Segment, causal_mask, shared_attention
from sparsekv.kernels.attention.decode_attention import shared_decode, shared_logsumexp
from sparsekv.kernels.common.hook import AttentionCall, LogitScaling
from sparsekv.kernels.common.kernel_inputs import Centroids
from sparsekv.runtime.attention.executors import Step, everything, in_place_runs, step_of
from sparsekv.runtime.attention.plan import LayerPlan
from sparsekv.runtime.cache.kv_store import Pair
from sparsekv.runtime.cache.packed_cache import PackedLayer, PackedStep, Piece, StepTokens
from sparsekv.runtime.cache.stored_layer import DenseLayer, DynamicSlot, MissedShares, StoredLayer
from sparsekv.runtime.selection.interface import Queries, Selection, Selector
from sparsekv.runtime.selection.wrappers import join_selections, unite


class SparseLayer(StoredLayer):
    """Attends exactly to sinks, tail and new tokens, and to the rows between sinks and tail that a selector selects.

    Args:
        exact: keys and values [Hk, sinks + tail, D] of the sinks and the tail.
    """

    def __init__(self, exact: Pair, split: Split, plan: LayerPlan):
        super().__init__(split.tokens, *exact)
        self.exact, self.split, self.plan = exact, split, plan
        self.read, self.conversation = plan.read, plan.selector.conversation

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        return self.plan.graph_state() is not None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        plan, decodes = self.plan, not self.prefills(call.query.shape[1])
        # Tokens move into the index only in decode steps. If a question's tokens moved, its first tokens could select
        # its later tokens.
        if decodes and plan.appender is not None:
            plan.appender.append_due(self)
        decode = plan.decode if self.step_row is None else plan.captured
        # The prefetcher comes first, because its pending search, in a thread, may change the conversation state.
        if not decodes and plan.prefetcher is not None:
            plan.prefetcher.forget()
        if not decodes and self.conversation is not None:
            self.conversation.forget()
        policy = decode if decodes else plan.prefill
        return policy.attend(step_of(self, call)).flatten(0, 1)

    def reserve(self, step_row: DynamicSlot, tokens: int) -> None:
        super().reserve(step_row, tokens)
        self.plan.read.deferred = True

    def buffers(self) -> tuple[int, ...]:
        return *super().buffers(), self.plan.graph_state() or 0

    def advance(self) -> None:
        super().advance()
        self.plan.read.advance()

    def release(self) -> None:
        super().release()
        self.plan.read.deferred = False

    def missed(self) -> MissedShares | None:
        meter = self.plan.meter
        return None if meter is None or not meter.heads else meter.means()

    def start_counting(self) -> None:
        self.plan.read.reset()
        if self.plan.meter is not None:
            self.plan.meter.reset()

    def rewind(self) -> None:
        super().rewind()
        self.start_counting()
        plan = self.plan
        if plan.prefetcher is not None:
            plan.prefetcher.forget()
        if self.conversation is not None:
            self.conversation.forget()
        if plan.appender is not None:
            plan.appender.remove_appended(self, self.split.tokens, self.exact)


def appends(layers: Iterable[StoredLayer]) -> bool:
    """Whether any of the layers moves an answer's tokens into the layer's index."""
    return any(isinstance(layer, SparseLayer) and layer.plan.appender is not None for layer in layers)


def divides_questions(layers: Iterable[StoredLayer]) -> bool:
    """Whether a question may be fed in several steps, without an effect on the rows that its tokens attend to.

    This needs questions that attend densely, and selectors that do not observe a question's queries. Otherwise the
    selection depends on which tokens are in a step.
    """
    sparse = (layer for layer in layers if isinstance(layer, SparseLayer))
    return all(layer.plan.prefills_densely and layer.conversation is None for layer in sparse)


class PackedDense(PackedLayer):
    """Batched dense layer: attends to the whole stored context, or to the part of it within a sliding window."""

    def __init__(self, layer: DenseLayer, slots: int):
        super().__init__(layer, slots)
        self.layer = layer

    def attend(self, call: AttentionCall, step: PackedStep) -> torch.Tensor:
        if call.window is not None or not call.query.is_cuda:
            return super().attend(call, step)
        # All tokens attend to the same stored rows, and so the tokens of questions and of answers read these rows in
        # one pass.
        self.own.write(call.keys, call.values, step)
        (runs, exact), own = self.layer.shared(), self.own.seen_by(step.everyone, step.longest)
        return shared_decode(call.grouped, runs, exact, (), own, *call.scaling).flatten(0, 1)

    def answer(self, call: AttentionCall, step: PackedStep) -> torch.Tensor:
        if call.query.shape[1] == 1 and not call.query.is_cuda:
            return self.layer.attend_once(call, self.own.of_only(step))
        own, mask = self.own.seen_by(step.answering, step.longest, call.window), None
        keys, values = self.layer.stored_rows()
        if call.window is not None:
            places = torch.arange(self.layer.out_of_sight, self.layer.stored, device=keys.device)
            mask = self.layer.stored + step.answering.rows[:, None] - places < call.window
        return shared_attention(call.grouped, [Segment(keys, values, mask)], own, *call.scaling).flatten(0, 1)

    def ask(self, call: AttentionCall, piece: Piece, number: int) -> torch.Tensor:
        return self.layer.attend_before(call, self.own.of_piece(piece))


class PackedSparse(PackedLayer):
    """Layer for a batch: a token attends to sinks, tail, its own sequence's new tokens, and selected middle rows.

    All answering sequences attend to the union of the rows that at least one of them selects.

    Args:
        dense_from: number of answer tokens in a step from which on these tokens attend to all rows; None: never.
    """

    def __init__(self, layer: SparseLayer, slots: int, dense_from: int | None = None):
        super().__init__(layer, slots)
        self.dense_from = dense_from
        self.plan, self.exact, self.tokens = layer.plan, layer.exact, layer.split.tokens
        self.kernels, self.conversation = layer.plan.selector.kernels, layer.conversation
        self.asked: dict[int, Selector] = {}
        """For each sequence, by slot, a copy of the selector with the state that the sequence's question left."""
        self.unasked = layer.plan.selector
        """The selector in its state before any question; a copy if questions change its state."""
        if self.conversation is not None:
            self.conversation.forget()
            self.unasked = copy(layer.plan.selector)
        # On a GPU, kernels read selected rows in place, and the host needs no sync for the number of selected rows.
        self.in_place = layer.exact[0].is_cuda and layer.plan.middle.reachable

    def answer(self, call: AttentionCall, step: PackedStep) -> torch.Tensor:
        if self.dense_from is None or call.query.shape[1] < self.dense_from:
            return self.select_and_attend(call, step)
        middle = self.plan.middle.used
        self.plan.read.add(2.0 * middle, middle)
        return self._attend_to_all(call, self.own.seen_by(step.answering, step.longest))

    def select_and_attend(self, call: AttentionCall, step: PackedStep) -> torch.Tensor:
        """Attend for the answering sequences, one token each, to the rows that are selected for these tokens."""
        if call.query.shape[1] == 1 and not call.query.is_cuda and not self.in_place and self.conversation is None:
            return self._answer_alone(call, step)
        plan, grouped, how = self.plan, call.grouped, call.scaling
        own = self.own.seen_by(step.answering, step.longest)
        queries, middle = self._queries(grouped, own, how).to(plan.gather.search_device), plan.middle.used
        if self.in_place and (rows := plan.middle.in_place()) is not None:
            chosen = self._select_for_each(queries, step)
            if chosen.cost.per_count:
                plan.read.per_count = chosen.cost.per_count
            plan.read.add(chosen.rows_read(), middle)
            runs = in_place_runs(rows, chosen.rows)
            return shared_decode(grouped, runs, self.exact, _centroids(chosen), own, *how).flatten(0, 1)
        each = self._select(queries, step)
        found = plan.gather.fetch(unite(each, plan.selector, middle), call.query.device)
        plan.read.add(found.rows_read, middle)
        shared = found.segments(Step(grouped, *self.exact, None, 0, None, 0, joint=False, how=how))
        return shared_attention(grouped, shared, own, *how).flatten(0, 1)

    def _answer_alone(self, call: AttentionCall, step: PackedStep) -> torch.Tensor:
        """Attend for the only answering sequence, by the policy and fused kernels of the cache of a single sequence."""
        own = self.own.of_only(step)
        keys, values = (torch.cat(pair, 1) for pair in zip(self.exact, own, strict=True))
        alone = Step(
            query=call.grouped,
            keys=keys,
            values=values,
            mask=None,
            first=self.tokens + own[0].shape[1] - 1,
            step_row=None,
            unstored=self.tokens - self.exact[0].shape[1],
            joint=False,
            how=call.scaling,
        )
        return self.plan.decode.attend(alone).flatten(0, 1)

    def ask(self, call: AttentionCall, piece: Piece, number: int) -> torch.Tensor:
        own = self.own.of_piece(piece)
        if self.conversation is not None:
            self.conversation.forget()
        keys, values = (torch.cat(pair, 1) for pair in zip(self.exact, own, strict=True))
        step = Step(
            query=call.grouped,
            keys=keys,
            values=values,
            mask=causal_mask(piece.tokens, keys.shape[1], None, keys.device),
            first=self.tokens + piece.before,
            step_row=None,
            unstored=self.tokens - self.exact[0].shape[1],
            joint=True,
            how=call.scaling,
            batch=1 + number,
        )
        output = self.plan.prefill.attend(step).flatten(0, 1)
        if self.conversation is not None:
            self.asked[piece.slot] = copy(self.plan.selector)
        return output

    def ask_all(self, call: AttentionCall, step: PackedStep, output: torch.Tensor) -> None:
        if not (self.in_place and self.plan.prefills_densely and self.conversation is None):
            return super().ask_all(call, step, output)
        asked = replace(call, query=call.query[:, step.places])
        output[:, step.places] = self._attend_to_all(asked, self.own.seen_by(step.asking, step.longest))

    def _attend_to_all(self, call: AttentionCall, own: OwnRows) -> torch.Tensor:
        """Attend with each query [Hq, B, D] to all rows between sinks and tail, to exact rows, and to its own sequence.

        If rows cannot be read in place, rows that are not on the device are copied, and all rows' logits are allocated.
        """
        middle = self.plan.middle
        # `in_place()` may copy the rows on a CPU.
        rows = middle.in_place() if self.in_place else None
        if rows is None:
            segments = [Segment(*middle.in_any_order()), Segment(*self.exact)]
            return shared_attention(call.grouped, segments, own, *call.scaling).flatten(0, 1)
        runs, exact = everything(rows, middle.used, self.exact)
        return shared_decode(call.grouped, runs, exact, (), own, *call.scaling).flatten(0, 1)

    def _queries(self, grouped: torch.Tensor, own: OwnRows, how: LogitScaling) -> Queries:
        beside = partial(shared_logsumexp, grouped, self.exact[0], own, *how)
        return Queries(grouped, lambda: self.tokens + own.used - 1, beside, joint=False)

    def _select_for_each(self, queries: Queries, step: PackedStep) -> Selection:
        """Return the union of the selections of all queries, computed by the selector's kernel or else in torch."""
        selector, middle = self.plan.selector, self.plan.middle.used
        if self.kernels is not None and self.kernels.choose_for_each is not None:
            chosen = self.kernels.choose_for_each(queries, self.plan.budget, self.plan.read.by_kernels)
            if chosen is not None:
                return chosen
        return unite(self._select(queries, step), selector, middle, middle)

    def _select(self, queries: Queries, step: PackedStep) -> Selection:
        """Return a selection for each query.

        If the selector has a conversation state, the copy of the selector for the query's slot selects.
        """
        if self.conversation is None:
            return self.plan.selector.select(queries, self.plan.budget)
        selectors = [self.asked.get(slot, self.unasked) for slot in step.answering.slots.tolist()]
        own = (queries.of_tokens(slice(place, place + 1)) for place in range(len(selectors)))
        return join_selections(
            [selector.select(one, self.plan.budget) for selector, one in zip(selectors, own, strict=True)]
        )


class PackedInPlace(PackedSparse):
    """Layer for a batch, with kernels that select together for all sequences and read the selected rows in place.

    All tokens of a step attend to the union of the rows that the sequences select. If the config has dense attention
    for questions, a question's tokens attend to all rows instead.
    """

    def attend(self, call: AttentionCall, step: PackedStep) -> torch.Tensor:
        if not step.pieces or self.plan.prefills_densely:
            return super().attend(call, step)
        self.own.write(call.keys, call.values, step)
        return self._together(call, step.everyone, step, answers=len(step.single) > 0)

    def select_and_attend(self, call: AttentionCall, step: PackedStep) -> torch.Tensor:
        return self._together(call, step.answering, step, answers=True)

    def _together(self, call: AttentionCall, tokens: StepTokens, step: PackedStep, *, answers: bool) -> torch.Tensor:
        """Select and attend for some tokens of a step; return [Hq, T, D].

        Args:
            tokens: the T tokens.
            answers: whether some of these tokens belong to answers. Only then are the rows read counted.
        """
        plan, kernels, rows = self.plan, self.kernels, self.plan.middle.in_place()
        assert kernels is not None
        assert kernels.choose_together is not None
        assert rows is not None
        grouped, how = call.grouped, call.scaling
        own, counter = self.own.seen_by(tokens, step.longest), plan.read.by_kernels if answers else None
        chosen = kernels.choose_together(
            self._queries(grouped, own, how), tokens.ends, tokens.asks, plan.budget, counter
        )
        if answers:
            plan.read.per_count = chosen.cost.per_count
            plan.read.add(chosen.rows_read(), plan.middle.used)
        runs = in_place_runs(rows, chosen.rows)
        return shared_decode(grouped, runs, self.exact, _centroids(chosen), own, *how).flatten(0, 1)


def packed_layer(layer: StoredLayer, slots: int) -> PackedLayer:
    """Make the layer that attends for several sequences over the stored context of a single sequence's `layer`."""
    if isinstance(layer, SparseLayer):
        plan, kernels = layer.plan, layer.plan.selector.kernels
        together = plan.own_prefill or (plan.prefills_densely and layer.conversation is None)
        in_place = layer.exact[0].is_cuda and plan.middle.reachable and together
        if in_place and kernels is not None and kernels.chooses_together(plan.budget):
            return PackedInPlace(layer, slots, plan.dense_from)
        return PackedSparse(layer, slots, plan.dense_from)
    assert isinstance(layer, DenseLayer)
    return PackedDense(layer, slots)


def _centroids(chosen: Selection) -> list[Centroids]:
    return [Centroids(part.keys, part.values, part.log_counts[:, 0]) for part in chosen.attended_segments()]
