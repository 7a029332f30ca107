"""Records what each layer attends to, step by step, reduced to passages at once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparsekv.kernels.attention.attention import Weighed, attend_once_with_weights, attend_with_weights
from sparsekv.runtime.attention.executors import Attended, Fetched, GatherExecutor, attend_in_layout
from sparsekv.runtime.attention.step import Step
from sparsekv.runtime.cache.layer_rows import LayerRows
from sparsekv.runtime.reporting.queries import QueryBlock
from sparsekv.runtime.reporting.recall import attempt_of, step_measures
from sparsekv.runtime.reporting.truth import truths
from sparsekv.runtime.selection.interface import Selector
from sparsekv.runtime.selection.selection import Selection
from sparsekv.runtime.tracing.largest import MOST_MISSED, Largest, largest
from sparsekv.runtime.tracing.shares import AttendedStep, Shares, dense_shares, own_shares

MEASURES = ("recall", "attention_mass", "output_error", "kv_fraction")


class RecordingExecutor(GatherExecutor):
    """Attends as a `GatherExecutor` does, and passes on what it attended to.

    Args:
        record: called once a step; of a question, which may be attended to piece by piece, with its last piece.
    """

    def __init__(self, *layer: Any, record: Callable[[AttendedStep], None], **options: Any):
        super().__init__(*layer, **options)
        self.record = record

    def attend_to_everything(self, step: Step) -> torch.Tensor:
        return attend_in_layout(self, step)

    def attend_to(self, step: Step, selection: Selection, selector: Selector) -> Attended:
        if step.mask is not None and not step.mask[-1].all():
            return super().attend_to(step, selection, selector)
        fetched = self.fetch(selection, step.query.device)
        weighed = _attend(step, fetched)
        self.record(AttendedStep(step, selection, selector, self.selector.layout, fetched, weighed.weights))
        return Attended(weighed.output, fetched.rows_read)


def _attend(step: Step, fetched: Fetched) -> Weighed:
    """As a step is attended to elsewhere, on a CPU in few operations where that can be."""
    if step.query.shape[2] == 1 and not step.query.is_cuda and (scored := fetched.scored_rest()) is not None:
        rows = (fetched.keys, fetched.values), (step.keys, step.values)
        once = attend_once_with_weights(step.query.squeeze(2), rows, scored, *step.how)
        return Weighed(once.output.unsqueeze(2), once.weights.unsqueeze(2))
    return attend_with_weights(step.query, fetched.segments(step), *step.how)


@dataclass(frozen=True)
class Reduced:
    """One layer's step: its shares without those of single tokens that were not chosen.

    by_passage [2 or 3, Hk, P]: what of each passage was chosen, stood for and, where that is known, missed; missed: the
    tokens [Hk, 4] of which most was, and how much, or None; measures: `MEASURES` [4, Hk] float64, or None, and then
    rows_read, the D-sized rows that were read for each KV head, a number or [Hk].
    """

    shares: Shares
    by_passage: torch.Tensor
    missed: Largest | None
    measures: torch.Tensor | None
    rows_read: torch.Tensor | float


@dataclass
class LayerRecorder:
    """Reduces the steps of one layer to passages.

    Args:
        lengths: [P] int64, the tokens of the middle that each passage has; passage_of: [M + 1] int64, the passage of
            each of these tokens, and P for none.
        wanted: tokens that the layer's budget allows.
        rows: the document's keys and values, for dense attention of the same queries; None: not computed.
        step_done: called with each step.
    """

    lengths: torch.Tensor
    passage_of: torch.Tensor
    wanted: int
    rows: LayerRows | None
    step_done: Callable[[Reduced], None]

    def __call__(self, one: AttendedStep) -> None:
        """Reduce a step; allocates [2, Hk, M] float32 a few times over, and with `rows` the logits on all tokens."""
        shares, measures = own_shares(one, len(self.passage_of) - 1), None
        if self.rows is not None:
            (truth,) = truths(self.rows, [last_query(one.step, self.rows)], shares.exact.device)
            found = step_measures(attempt_of(of_last_query(one.selection), one.layout, truth), truth, self.wanted)
            measures = torch.stack([found[name][:, 0].double() for name in MEASURES])
            shares = dense_shares(shares, truth.probability[:, 0])
        read = one.fetched.rows_read
        read = read[:, -1] if isinstance(read, torch.Tensor) else read
        missed = largest(shares.others[1], MOST_MISSED) if len(shares.others) > 1 else None
        by_passage, kept = self._by_passage(shares), replace(shares, others=shares.others[..., :0])
        self.step_done(Reduced(kept, by_passage, missed, measures, read))

    def _by_passage(self, shares: Shares) -> torch.Tensor:
        chosen = shares.chosen.new_zeros(len(shares.chosen), len(self.lengths) + 1)
        chosen.scatter_add_(1, self.passage_of[shares.positions], shares.chosen)
        lengths = self.lengths.expand(*shares.others.shape[:2], -1).contiguous()
        others = torch.segment_reduce(shares.others, "sum", lengths=lengths, axis=2)
        return torch.cat([chosen[None, :, :-1], others])


def last_query(step: Step, rows: LayerRows) -> QueryBlock:
    """A step's last query with the tokens after the stored ones, as a report measures it."""
    split, sinks = rows.artifact.manifest.split, step.how[2]
    stored = split.sinks + split.tail
    return QueryBlock(
        queries=step.query[:, :, -1:].flatten(0, 1),
        keys=step.keys[:, stored:],
        values=step.values[:, stored:],
        visible=torch.tensor([step.keys.shape[1] - split.sinks]),
        sink_logits=None if sinks is None else sinks.flatten(),
    )


def of_last_query(selection: Selection) -> Selection:
    """A selection of several queries, or shared by them, for the last of them alone."""
    rows, cost, rest = selection.rows, selection.cost, selection.rest
    lengths, weights, read = rows.run_lengths, rows.log_weights, cost.index_rows
    last = replace(
        rows,
        starts=rows.starts[:, -1:],
        run_lengths=None if lengths is None else lengths[:, -1:],
        log_weights=None if weights is None else weights[:, :, -1:],
    )
    if isinstance(read, torch.Tensor):
        cost = replace(cost, index_rows=read[:, -1:])
    if rest is not None:
        parts = tuple(replace(part, log_counts=part.log_counts[:, -1:], scored=None) for part in rest.segments())
        rest = replace(rest, segments=lambda: parts)
    return replace(selection, rows=last, cost=cost, rest=rest)
