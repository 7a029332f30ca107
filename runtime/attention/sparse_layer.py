"""A layer that attends to what a selector chooses of a stored context, and to all that came after it."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from sparsekv.formats.pages import release_pages
from sparsekv.formats.schema import LayerFacts, Split
from sparsekv.kernels.attention.attention import Segment, attend, attend_once, attend_with_logsumexp, causal_mask
from sparsekv.kernels.attention.decode_attention import RunRows, StandIns, decode_attention
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.kernels.common.runs import expand_full_runs, expand_runs
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.kernels.tables.list_ranks import ExactKeys
from sparsekv.runtime.attention.guard import Attempt, Gauge, Guard, Held, missed_share
from sparsekv.runtime.attention.prefetch import Ahead, Found
from sparsekv.runtime.attention.question import QuestionSearch
from sparsekv.runtime.cache.kv_store import MiddleRows, Pair
from sparsekv.runtime.cache.stored_layer import StoredLayer
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.interface import Asked, Replacement, Selection, Selector


@dataclass
class ReadRows:
    """Rows of size D that decode steps have read for the middle, summed over KV heads, and those dense would read.

    What depends on data is counted where the data is, without waiting for it; what is `known` costs it nothing. Kernels
    count to `by_kernels` [Hk] int64, `each_by_kernels` rows at a time.
    """

    counted: torch.Tensor
    by_kernels: torch.Tensor
    each_by_kernels: int = 0
    known: float = 0.0
    dense: int = 0

    def counters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What a step changes on the device."""
        return self.counted, self.by_kernels

    def total(self) -> float:
        """Rows that were read; two syncs."""
        return float(self.counted) + self.known + self.each_by_kernels * int(self.by_kernels.sum())

    @torch.inference_mode()
    def reset(self) -> None:
        """Count from nothing again, in the same place: a captured step adds to it."""
        self.counted.zero_()
        self.by_kernels.zero_()
        self.known, self.dense = 0.0, 0


class SparseLayer(StoredLayer):
    """Attends to sinks, tail and new tokens exactly, and to the rows of the middle that a selector chooses.

    A selector that takes tokens in gets the oldest exact ones but the sinks while the model decodes: the middle grows.
    With a gauge it tells how much attention a choice leaves; its guard, if it has one, lets no head leave too much.

    Args:
        exact: keys and values [Hk, sinks + tail, D] of what is always attended.
        middle: where the rows lie that are chosen from, in the selector's layout.
        ahead: search for the next decode step's rows while this one is attended to.
        search_device: where the selector is; None: where the model is.
        let_go: keep no page of the index's files in memory that the selector has looked at.
        question: what a question's tokens attend to, where the selector does not choose for these.
    """

    def __init__(
        self,
        exact: Pair,
        middle: MiddleRows,
        split: Split,
        facts: LayerFacts,
        selector: Selector,
        budget: Budget,
        gauge: Gauge | None = None,
        *,
        ahead: bool = False,
        search_device: torch.device | None = None,
        let_go: bool = False,
        question: QuestionSearch | None = None,
    ):
        super().__init__(split.tokens, *exact)
        self.exact, self.middle, self.search_device, self.let_go = exact, middle, search_device, let_go
        self.facts, self.selector, self.budget, self.split, self.gauge = facts, selector, budget, split, gauge
        self.question = question
        self.ahead = Ahead(partial(self._find, budget)) if ahead else None
        device = self.exact[0].device
        self.read = ReadRows(
            torch.zeros((), dtype=torch.float64, device=device),
            torch.zeros(len(self.exact[0]), dtype=torch.int64, device=device),
        )
        self.last_known, self.last_dense = 0.0, 0

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        """Where kernels attend to rows as these lie, and each step chooses as the one before."""
        alike = self.selector.steps_alike and not self.selector.takes
        return alike and self.gauge is None and self.ahead is None and self.middle.in_place() is not None

    def buffers(self) -> tuple[int, ...]:
        return *super().buffers(), self.selector.version

    def advance(self) -> None:
        super().advance()
        self.read.known += self.last_known
        self.read.dense += self.last_dense

    def rewind(self) -> None:
        super().rewind()
        self.read.reset()
        if self.gauge is not None:
            self.gauge.reset()
        if self.ahead is not None:
            self.ahead.forget()
        self._take_back()

    @torch.inference_mode()
    def _take_back(self) -> None:
        # In inference mode, because rows that grew while a model decoded may be written in no other.
        order = self.selector.forget()
        if order is None:
            return
        self.stored = self.split.tokens
        self.middle.rewrite(self.selector.open_row, None, order)
        for rows, first in zip(self.exact_rows(), self.exact, strict=True):
            rows.copy_(first)

    def _hand_over(self) -> None:
        """Leave the newest rows exact, fewer than twice what the selector takes at a time, and hand it those before."""
        step, start = self.selector.takes, self.split.sinks
        if not step or self.used - start < 2 * step:
            return
        keys, values = self.exact_rows()
        moved = ((self.used - start) // step - 1) * step
        for first in range(start, start + moved, step):
            self._join(keys[:, first : first + step], values[:, first : first + step])
        for rows in (keys, values):
            rows[:, start : self.used - moved] = rows[:, start + moved :].clone()
        self.used, self.stored = self.used - moved, self.stored + moved

    def _join(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.ahead is not None:
            self.ahead.forget()
        start = self.selector.open_row
        open_keys, open_values = self.middle.from_row(start)
        all_keys, all_values = torch.cat([open_keys, keys], 1), torch.cat([open_values, values], 1)
        where = self.search_device or keys.device
        taken = self.selector.take(all_keys.to(where), all_values.to(where))
        self.middle.rewrite(start, (keys, values), taken.order)
        self.read.known += len(keys) * (taken.index_rows + 2 * all_keys.shape[1])

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.query.shape[1] == 1:
            # Not within a question: its first tokens must not see what its last ones did to the clusters.
            self._hand_over()
            if not call.query.is_cuda and self.place is None and self.gauge is None and self.ahead is None:
                return self._attend_once(call)
        elif self.question is not None:
            return self._attend_question(call, self.question)
        step = self._step(call)
        if step.asked.query.shape[2] == 1 and self._kernels_reach(call.query):
            return self._attend_in_place(step)
        if self.gauge is None:
            chosen, segments = self._choose(step, self.budget)
            self._count(self._rows_read(chosen), step.asked)
            return attend(step.asked.query, segments, *step.how).flatten(0, 1)
        held = self._held(step, self.gauge.guard)
        self.gauge.add(held)
        self._count(held.attempt.rows, step.asked)
        return held.attempt.results[0].transpose(1, 2).flatten(0, 1)

    def _attend_once(self, call: AttentionCall) -> torch.Tensor:
        """One query's attention on a CPU, where what is neither computed nor looked at is what is fast."""
        keys, values = self.exact_rows()
        Hk, _, D = keys.shape
        sinks = None if call.sink_logits is None else call.sink_logits.view(Hk, -1)
        if (in_place := self.middle.in_place()) is not None:
            grouped = call.query.view(Hk, -1, D)
            done = self.selector.attend_at_once(grouped, in_place, (keys, values), self.budget, sinks)
            if done is not None:
                output, read = done
                self._count_step(Hk * read, Hk)
                return output.view(-1, 1, D)
        query, how = call.query.view(Hk, -1, 1, D), (call.softmax_scale, call.softcap)
        asked = Asked(
            query,
            lambda: self._step(call).asked.positions(),
            lambda: self._step(call).asked.exact_logsumexp(),
            shared=False,
        )
        found = self._find(self.budget, asked)
        chosen = found.chosen
        self._count(self._rows_read(chosen), asked)
        stand_ins = [part.at_once for part in chosen.replacements if part.at_once is not None]
        if found.valid is None and chosen.log_weights is None and len(stand_ins) == len(chosen.replacements):
            rows = (found.keys, found.values), (keys, values)
            return attend_once(query.squeeze(2), rows, stand_ins, *how, sinks).flatten(0, 1).unsqueeze(1)
        return attend(query, self._segments(found, self._step(call)), *how, sinks).flatten(0, 1)

    def _kernels_reach(self, query: torch.Tensor) -> bool:
        """Whether kernels can attend to rows where these lie, and nothing else is asked of the step."""
        on_device = query.is_cuda or self.place is not None
        return on_device and self.gauge is None and self.ahead is None and self.middle.in_place() is not None

    def _attend_in_place(self, step: "_Step") -> torch.Tensor:
        """One query's attention without a copy of any row; what was drawn with weights goes the other way."""
        chosen = self.selector.select(replace(step.asked, counter=self.read.by_kernels), self.budget)
        grouped, rows = step.asked.query, self.middle.in_place()
        self._count(self._rows_read(chosen), step.asked)
        self.read.each_by_kernels = chosen.each_counted
        count = None if self.place is None else self.place.count
        if chosen.log_weights is not None or rows is None:
            return attend(grouped, self._segments(self._fetch(chosen, grouped.device), step), *step.how).flatten(0, 1)
        runs = _runs(rows, chosen)
        stand_ins = chosen.stand_ins
        if stand_ins is None:
            stand_ins = tuple(self._stand_in(part, step) for part in chosen.replacements)
        exact = step.exact.keys, step.exact.values
        output = decode_attention(grouped[:, :, 0], runs, exact, stand_ins, *step.how, exact_count=count)
        return output.flatten(0, 1)[:, None]

    def _stand_in(self, part: Replacement, step: "_Step") -> StandIns:
        if part.at_once is not None:
            return part.at_once
        logits = attention_logits(step.asked.query, part.keys, *step.how[:2])[:, :, 0]
        return StandIns(logits, part.log_counts[:, 0], part.values)

    def _attend_question(self, call: AttentionCall, question: QuestionSearch) -> torch.Tensor:
        self.selector.observe(self._step(call).asked.to(self.search_device or call.query.device))
        parts = []
        for start in range(0, call.query.shape[1], question.chunk_size):
            step = self._step(call, slice(start, start + question.chunk_size))
            found = self._fetch(question.select(step.asked), step.asked.query.device)
            parts.append(attend(step.asked.query, self._segments(found, step), *step.how))
        return torch.cat(parts, 2).flatten(0, 1)

    def _step(self, call: AttentionCall, piece: slice = slice(None)) -> "_Step":
        """A piece of a call's queries; what they share, they share with all of the call."""
        (keys, values), place = self.exact_rows(), self.place
        Hk, queries, tokens = keys.shape[0], call.query.shape[1], self.get_seq_length()
        mask = None if queries == 1 else causal_mask(queries, self.used, None, keys.device)[piece]
        grouped = call.query.view(Hk, -1, *call.query.shape[1:])
        grouped = grouped if piece == slice(None) else grouped[:, :, piece]
        sinks = None if call.sink_logits is None else call.sink_logits.view(Hk, -1)

        def exact_logsumexp() -> torch.Tensor:
            logits = attention_logits(grouped, keys, call.softmax_scale, call.softcap)
            seen = self._there(keys) if mask is None else mask
            return (logits if seen is None else logits.masked_fill(~seen, -torch.inf)).logsumexp(-1)

        def positions() -> torch.Tensor:
            if place is not None:
                return place.row + (self.stored - self.first)
            return torch.arange(tokens - queries, tokens, device=keys.device)[piece]

        seen_by_all = ExactKeys(keys, None if place is None else place.count) if mask is None else None
        asked = Asked(grouped, positions, exact_logsumexp, shared=queries > 1, exact_keys=seen_by_all)
        return _Step(asked, Segment(keys, values, mask), (call.softmax_scale, call.softcap, sinks))

    def _there(self, rows: torch.Tensor) -> torch.Tensor | None:
        """[1, rows]: which of those that there is room for there are, where only the device knows; None: all."""
        if self.place is None:
            return None
        return torch.arange(rows.shape[1], device=rows.device)[None] < self.place.count

    def _choose(self, step: "_Step", budget: Budget) -> tuple[Selection, list[Segment]]:
        """A choice, and what is attended with it: chosen rows, exact ones, centroids in the place of others."""
        ahead = self.ahead is not None and not step.asked.shared and budget == self.budget
        found = self.ahead.next(step.asked) if self.ahead is not None and ahead else self._find(budget, step.asked)
        return found.chosen, self._segments(found, step)

    def _segments(self, found: Found, step: "_Step") -> list[Segment]:
        exact, valid = step.exact, None if found.valid is None else found.valid[:, None]
        return [
            Segment(found.keys, found.values, valid, found.chosen.log_weights),
            exact if self.place is None else replace(exact, mask=self._there(exact.keys)),
            *(Segment(part.keys, part.values, bias=part.log_counts[:, None]) for part in found.chosen.replacements),
        ]

    def _find(self, budget: Budget, asked: Asked) -> Found:
        chosen = self.selector.select(asked.to(self.search_device or asked.query.device), budget)
        return self._fetch(chosen, asked.query.device)

    def _fetch(self, chosen: Selection, here: torch.device) -> Found:
        """The chosen rows, brought to a device."""
        valid = None
        if chosen.taken == chosen.capacity and not chosen.starts.is_cuda:
            rows = expand_full_runs(chosen.starts, chosen.lengths, chosen.capacity)
        else:
            rows, valid = expand_runs(chosen.starts, chosen.lengths, chosen.capacity)
        if chosen.starts.device != here:
            weights = None if chosen.log_weights is None else chosen.log_weights.to(here)
            stand_ins = tuple(part.to(here) for part in chosen.replacements)
            chosen = replace(chosen, replacements=stand_ins, log_weights=weights)
        found = Found(chosen, *self.middle.gather(rows.flatten(1)), None if valid is None else valid.to(here))
        for tensor in self.selector.mapped if self.let_go else ():
            release_pages(tensor)
        return found

    def _held(self, step: "_Step", guard: Guard | None) -> Held:
        if guard is not None:
            attempts, whole = partial(self._attempt, step), partial(self._whole, step)
            return guard.hold(attempts, whole, self.budget, self.middle.used)
        attempt = self._attempt(step, self.budget)
        nowhere = torch.zeros_like(attempt.missed, dtype=torch.bool)
        return Held(attempt, nowhere, nowhere)

    def _attempt(self, step: "_Step", budget: Budget) -> Attempt:
        chosen, segments = self._choose(step, budget)
        attended = attend_with_logsumexp(step.asked.query, segments, *step.how)
        missed = missed_share(chosen, step.asked, attended.logsumexp, self.facts)
        rows = torch.as_tensor(self._rows_read(chosen), device=missed.device).expand_as(missed)
        return Attempt(missed, rows, (attended.output.transpose(1, 2),))

    def _whole(self, step: "_Step", heads: torch.Tensor) -> Attempt:
        """Dense attention of some heads [Hk]; copies their rows of the middle."""
        some, exact, (scale, softcap, sinks) = heads.nonzero()[:, 0], step.exact, step.how
        middle = Segment(*(rows[some] for rows in self.middle.from_row(0)))
        segments = [middle, Segment(exact.keys[some], exact.values[some], exact.mask)]
        query = step.asked.query
        output = torch.zeros_like(query)
        output[some] = attend(query[some], segments, scale, softcap, None if sinks is None else sinks[some])
        missed = torch.zeros_like(query[:, 0, :, 0], dtype=torch.float32)
        return Attempt(missed, torch.full_like(missed, 2.0 * self.middle.used), (output.transpose(1, 2),))

    def _rows_read(self, chosen: Selection) -> torch.Tensor | float:
        """[Hk, Q or 1] rows of size D, or a number where it is the same for all and known without looking."""
        # A number is added as one: made a tensor, its copy to a GPU would wait for all that the GPU has still to do.
        return 2 * (chosen.lengths.sum(-1) if chosen.taken is None else chosen.taken) + chosen.index_rows

    def _count(self, rows: torch.Tensor | float, asked: Asked) -> None:
        """Count the rows [Hk, Q or 1] of a decode step."""
        if asked.shared:
            return
        heads, known = asked.query.shape[0], 0.0
        if isinstance(rows, int | float):
            known = heads * rows
        else:
            self.read.counted += rows.sum()
        self._count_step(known, heads)

    def _count_step(self, known: float, heads: int) -> None:
        """Count the rows of a step that are known without looking, and those that dense attention would read."""
        dense = 2 * heads * self.middle.used
        if self.place is None:
            self.read.known += known
            self.read.dense += dense
        else:
            # A replay does not come by here: `advance` adds it.
            self.last_known, self.last_dense = known, dense


def _runs(rows: Pair, chosen: Selection) -> RunRows:
    """Of the rows where they lie, keys and values [Hk, M, D], those that were chosen for one query."""
    if chosen.listed is not None:
        listed = chosen.listed
        # What is known here is not waited for on the device.
        used = None if chosen.taken == chosen.capacity else listed.used
        return RunRows(*rows, listed.rows, None, chosen.capacity, used, listed.queue)
    ends = None if chosen.single_rows else chosen.lengths.cumsum(-1, dtype=torch.int32)[:, 0]
    return RunRows(*rows, chosen.starts[:, 0], ends, chosen.capacity)


@dataclass(frozen=True)
class _Step:
    """A call's queries, what they attend to exactly, and how: softmax scale, soft cap, sink logits [Hk, G]."""

    asked: Asked
    exact: Segment
    how: tuple[float, float | None, torch.Tensor | None]
