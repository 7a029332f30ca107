"""Records what each layer attends to, step by step, reduced to passages at once."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.functional import pad

from sparsekv.kernels.attention.attention import attend_with_weights
from sparsekv.runtime.attention.executors import Attended, GatherExecutor
from sparsekv.runtime.attention.step import Step
from sparsekv.runtime.cache.layer_rows import LayerRows
from sparsekv.runtime.reporting.queries import QueryBlock
from sparsekv.runtime.reporting.recall import attempt_of, step_measures
from sparsekv.runtime.reporting.truth import truths
from sparsekv.runtime.selection.interface import Selector
from sparsekv.runtime.selection.selection import Selection
from sparsekv.runtime.tracing.shares import AttendedStep, Shares, dense_shares, own_shares

MOST_IN_RECORD, MOST_CHOSEN, MOST_MISSED = 16, 8, 4
"""Passages and tokens that a record lists."""
MEASURES = ("recall", "attention_mass", "output_error", "kv_fraction")


class RecordingExecutor(GatherExecutor):
    """Attends as a `GatherExecutor` does, and passes on what it attended to.

    Args:
        record: called once a step; of a question, which may be attended to piece by piece, with its last piece.
    """

    def __init__(self, *layer: Any, record: Callable[[AttendedStep], None], **options: Any):
        super().__init__(*layer, **options)
        self.record = record

    def attend_to(self, step: Step, selection: Selection, selector: Selector) -> Attended:
        if step.mask is not None and not step.mask[-1].all():
            return super().attend_to(step, selection, selector)
        fetched = self.fetch(selection, step.query.device)
        weighed = attend_with_weights(step.query, fetched.segments(step), *step.how)
        self.record(AttendedStep(step, selection, selector, self.selector.layout, fetched, weighed.weights))
        return Attended(weighed.output, fetched.rows_read)


@dataclass(frozen=True)
class Largest:
    """The largest shares, the largest first: places [..., K] int64, of passages or of tokens of the middle, and their
    shares [1, ..., K], of passages what was chosen, stood for and missed [2 or 3, ..., K]."""

    places: torch.Tensor
    shares: torch.Tensor


@dataclass(frozen=True)
class Record:
    """One layer's step: totals [3 or 4, Hk] of the shares, the largest of each KV head, and `MEASURES` [4, Hk] float64,
    NaN if unknown."""

    totals: torch.Tensor
    passages: Largest
    chosen: Largest
    missed: Largest
    measures: torch.Tensor


@dataclass
class LayerRecorder:
    """Records the steps of one layer.

    Args:
        lengths: [P] int64, the tokens of the middle that each passage has; passage_of: [M + 1] int64, the passage of
            each of these tokens, and P for none.
        wanted: tokens that the layer's budget allows.
        rows: the document's keys and values, for dense attention of the same queries; None: not computed.
        step_done: called with each step's shares of all passages [2 or 3, Hk, P].
    """

    lengths: torch.Tensor
    passage_of: torch.Tensor
    wanted: int
    rows: LayerRows | None
    step_done: Callable[[torch.Tensor], None]
    records: list[Record] = field(default_factory=list)
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    def __call__(self, one: AttendedStep) -> None:
        """Record a step; allocates [3, Hk, M] float32 a few times over, and with `rows` the logits on all tokens."""
        shares, measures = self._measured(one, own_shares(one, self.middle))
        by_passage = self._by_passage(shares)
        passages = largest_passages(by_passage, MOST_IN_RECORD)
        chosen = _largest(shares.chosen, MOST_CHOSEN, shares.positions)
        missed = _largest(shares.others[-1], 0 if self.rows is None else MOST_MISSED)
        self.records.append(Record(shares.totals(), passages, chosen, missed, measures))
        self.sums = self.sums + by_passage
        self.step_done(by_passage)

    @property
    def middle(self) -> int:
        """M."""
        return len(self.passage_of) - 1

    def mean(self) -> torch.Tensor:
        """[2 or 3, Hk, P]: the mean over steps of what was chosen, stood for and missed of each passage."""
        return self.sums / len(self.records)

    def _by_passage(self, shares: Shares) -> torch.Tensor:
        """[2 or 3, Hk, P]: what was chosen, stood for and missed of each passage."""
        chosen = shares.chosen.new_zeros(len(shares.chosen), len(self.lengths) + 1)
        chosen.scatter_add_(1, self.passage_of[shares.positions], shares.chosen)
        lengths = self.lengths.expand(*shares.others.shape[:2], -1).contiguous()
        others = torch.segment_reduce(shares.others, "sum", lengths=lengths, axis=2)
        return torch.cat([chosen[None, :, :-1], others])

    def _measured(self, one: AttendedStep, own: Shares) -> tuple[Shares, torch.Tensor]:
        """The shares to record, and the step's `MEASURES`."""
        if self.rows is None:
            read = torch.as_tensor(one.fetched.rows_read, device=own.exact.device, dtype=torch.float64)
            read = read[..., -1] if read.ndim else read
            unknown = torch.full_like(own.exact, torch.nan, dtype=torch.float64)
            return own, torch.stack([unknown, unknown, unknown, (read / (2 * self.middle)).expand_as(unknown)])
        (truth,) = truths(self.rows, [last_query(one.step, self.rows)], own.exact.device)
        attempt = attempt_of(of_last_query(one.selection), one.layout, truth)
        found = step_measures(attempt, truth, self.wanted)
        measures = torch.stack([found[name][:, 0].double() for name in MEASURES])
        return dense_shares(own, truth.probability[:, 0]), measures


def largest_passages(shares: torch.Tensor, most: int) -> Largest:
    """The passages of the largest sums, from what was chosen, stood for and missed [2 or 3, ..., P] of each."""
    places = shares.sum(0).topk(min(most, shares.shape[-1])).indices
    return Largest(places, shares.gather(-1, places.expand(len(shares), *places.shape)))


def _largest(shares: torch.Tensor, most: int, positions: torch.Tensor | None = None) -> Largest:
    """The `most` largest of shares [Hk, R], zeros where there are fewer; at positions [Hk, R], by default their own."""
    values, places = shares.topk(min(most, shares.shape[1]))
    places = places if positions is None else positions.gather(1, places)
    if (short := most - places.shape[1]) > 0:
        values, places = pad(values, (0, short)), pad(places, (0, short))
    return Largest(places, values[None])


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
