"""Record what each layer and each answer token attends to, as the attention shares of the document's passages."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.functional import pad

from sparsekv.kernels.attention.attention import Weighed, attend_once_with_weights, attend_with_weights
from sparsekv.runtime.attention.executors import Fetched, GatherExecutor, LayerOutput, Step, attend_in_layout
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.reporting.recall import QueryBlock, attempt_of, chosen_positions, step_measures, truths
from sparsekv.runtime.selection.interface import Selection, Selector


@dataclass(frozen=True)
class AttendedStep:
    """One layer's attention in a step of Q queries that share a selection.

    Attributes:
        selection: the selector's selection, as indices of stored rows.
        layout: [Hk, M], the middle position of each stored row; None: rows are stored in order of position.
        fetched: the keys and values fetched for the selection.
        weights: attention weights [Hk, G, Q, T] of selected rows, exact rows (sinks, tail and new tokens), centroids of
            the unselected tokens, and learned sink logits, in this order.
    """

    step: Step
    selection: Selection
    selector: Selector
    layout: torch.Tensor | None
    fetched: Fetched
    weights: torch.Tensor


@dataclass(frozen=True)
class Shares:
    """Attention shares of a step's last query, as the mean over the query heads of each KV head. They add up to one.

    Attributes:
        exact: [Hk], share of sinks, tail and new tokens.
        positions: [Hk, R] int64, positions in the middle of the selected tokens; M in unused slots.
        chosen: [Hk, R], share of each selected token.
        others: [1 or 2, Hk, M], shares of each token of the middle: the share that the token got through its centroid
            (`stood_for`) and, if dense attention was computed, the share beyond that which the token has in dense
            attention (missed).
        nowhere: [Hk], share of centroids whose tokens are not known. `totals` adds it to the share of centroids.
    """

    exact: torch.Tensor
    positions: torch.Tensor
    chosen: torch.Tensor
    others: torch.Tensor
    nowhere: torch.Tensor

    def totals(self) -> torch.Tensor:
        """Sum the shares over tokens [3 or 4, Hk]: exact, selected, through centroids, and missed if it is known."""
        stood_for, *missed = self.others.sum(-1)
        return torch.stack([self.exact, self.chosen.sum(-1), stood_for + self.nowhere, *missed])


def own_shares(one: AttendedStep, middle: int) -> Shares:
    """Compute shares from the weights of the recorded step. A centroid's weight is spread evenly over its tokens.

    Args:
        middle: number M of tokens between sinks and tail.
    """
    rows, exact, weights = one.fetched.keys.shape[1], one.step.exact.keys.shape[1], one.weights[:, :, -1].mean(1)
    rest = sum(part.keys.shape[1] for part in one.fetched.rest) if one.fetched.rest_attended else 0
    chosen, beside, of_rest = weights[:, :rows], weights[:, rows : rows + exact].sum(1), weights[:, rows + exact :]
    if one.step.how[2] is not None:
        beside, of_rest = beside + of_rest[:, -1], of_rest[:, :-1]
    positions = chosen_positions(one.selection.rows, one.layout, middle)[:, -1].to(weights.device)
    report = one.selector.report
    if not rest or report is None or report.centroid_of is None:
        return Shares(beside, positions, chosen, weights.new_zeros(1, len(weights), middle), of_rest.sum(1))
    numbers = report.centroid_of(one.fetched.rest).to(weights.device)
    left = weights.new_ones(len(weights), middle + 1).scatter_(1, positions, 0.0)[:, :middle]
    return Shares(beside, positions, chosen, spread(of_rest, numbers, left)[None], torch.zeros_like(beside))


def dense_shares(own: Shares, dense: torch.Tensor) -> Shares:
    """Compute shares from the weights of dense attention.

    The weight of an unselected token is split in two. The part up to the weight that the token got through its centroid
    counts as represented (`stood_for`). The part above it counts as missed.

    Args:
        own: the shares of the recorded step, from `own_shares`.
        dense: [Hk, M], weights of dense attention, mean over the query heads.
    """
    padded = torch.nn.functional.pad(dense, (0, 1))
    left = padded.scatter(1, own.positions, 0.0)[:, :-1]
    stood_for = torch.minimum(left, own.others[0])
    others = torch.stack([stood_for, left - stood_for])
    return Shares(
        1 - dense.sum(-1), own.positions, padded.gather(1, own.positions), others, torch.zeros_like(own.nowhere)
    )


def spread(weights: torch.Tensor, numbers: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Spread the weight of each centroid [Hk, C] evenly over its tokens: [Hk, M].

    Args:
        numbers: [Hk, M] int64, index of each token's centroid.
        left: [Hk, M], 1 for a token that a centroid represents, else 0.
    """
    counts = torch.zeros_like(weights).scatter_add_(1, numbers, left)
    return (weights / counts.clamp(min=1)).gather(1, numbers) * left


MOST_IN_RECORD, MOST_IN_MEAN = 16, 64
"""Number of passages listed for one token, layer and KV head, and number listed for a mean over several of these."""
MOST_CHOSEN, MOST_MISSED = 8, 4
"""Number of selected tokens, and of missed tokens, listed for one answer token, layer and KV head."""


@dataclass(frozen=True)
class Largest:
    """The largest shares, the largest first.

    Attributes:
        places: [..., K] int64, indices of passages or of tokens of the middle.
        shares: [1, ..., K] for tokens. [2 or 3, ..., K] for passages: the shares that were chosen, represented by
            centroids and, if it is known, missed.
    """

    places: torch.Tensor
    shares: torch.Tensor


def largest(shares: torch.Tensor, most: int, positions: torch.Tensor | None = None) -> Largest:
    """Return the `most` largest of shares [..., R], padded with zeros if there are fewer.

    Args:
        positions: [..., R], the places that are returned for the shares; None: the indices in the last axis.
    """
    values, places = shares.topk(min(most, shares.shape[-1]))
    places = places if positions is None else positions.gather(-1, places)
    if (short := most - places.shape[-1]) > 0:
        values, places = pad(values, (0, short)), pad(places, (0, short))
    return Largest(places, values[None])


def largest_passages(shares: torch.Tensor, most: int) -> Largest:
    """Return the passages with the largest totals of the shares [2 or 3, ..., P] of P passages.

    The first axis has the shares that were selected, represented by centroids and, if it is known, missed.
    """
    places = shares.sum(0).topk(min(most, shares.shape[-1])).indices
    return Largest(places, shares.gather(-1, places.expand(len(shares), *places.shape)))


MEASURES = ("recall", "attention_mass", "output_error", "kv_fraction")


class RecordingExecutor(GatherExecutor):
    """Executor that attends as a `GatherExecutor` does, and passes each `AttendedStep` to a recorder.

    Args:
        layer, options: the arguments of `GatherExecutor`.
        record: called once per step. If a question is attended to piece by piece, it is called only for the last piece.
    """

    def __init__(self, *layer: Any, record: Callable[[AttendedStep], None], **options: Any):
        super().__init__(*layer, **options)
        self.record = record

    def attend_to_everything(self, step: Step) -> torch.Tensor:
        return attend_in_layout(self, step)

    def attend_to(self, step: Step, selection: Selection, selector: Selector) -> LayerOutput:
        if step.mask is not None and not step.mask[-1].all():
            return super().attend_to(step, selection, selector)
        fetched = self.fetch(selection, step.query.device)
        weighed = _attend(step, fetched)
        self.record(AttendedStep(step, selection, selector, self.selector.layout, fetched, weighed.weights))
        return LayerOutput(weighed.output, fetched.rows_read)


def _attend(step: Step, fetched: Fetched) -> Weighed:
    """Attend to a step's rows; return output and weights. A decode step on a CPU takes fewer operations if the logits
    of its centroids are known."""
    if step.query.shape[2] == 1 and not step.query.is_cuda and (scored := fetched.scored_rest()) is not None:
        rows = (fetched.keys, fetched.values), (step.keys, step.values)
        once = attend_once_with_weights(step.query.squeeze(2), rows, scored, *step.how)
        return Weighed(once.output.unsqueeze(2), once.weights.unsqueeze(2))
    return attend_with_weights(step.query, fetched.segments(step), *step.how)


@dataclass(frozen=True)
class Reduced:
    """Record of one layer's step, with shares of passages instead of shares of single tokens.

    Attributes:
        shares: the step's shares, in which `others` is empty.
        by_passage: [2 or 3, Hk, P], the share of each passage that was selected, represented by centroids and, if it is
            known, missed.
        missed: the `MOST_MISSED` tokens [Hk, 4] with the largest missed shares; None if missed shares are not known.
        measures: `MEASURES` [4, Hk] float64; None without dense attention.
        rows_read: D-sized rows read for each KV head, a number or [Hk].
    """

    shares: Shares
    by_passage: torch.Tensor
    missed: Largest | None
    measures: torch.Tensor | None
    rows_read: torch.Tensor | float


@dataclass
class LayerRecorder:
    """Reduces the steps of one layer to shares of passages.

    Args:
        lengths: [P] int64, number of tokens of the middle in each passage.
        passage_of: [M + 1] int64, the passage of each token of the middle. The last entry is P, for unused slots.
        wanted: number of tokens that the layer's budget allows.
        rows: the document's keys and values, for dense attention of the same queries; None: it is not computed.
        step_done: called with each reduced step.
    """

    lengths: torch.Tensor
    passage_of: torch.Tensor
    wanted: int
    rows: LayerRows | None
    step_done: Callable[[Reduced], None]

    def __call__(self, one: AttendedStep) -> None:
        """Reduce a step. Allocates [2, Hk, M] float32 a few times, and with `rows` the logits on all tokens."""
        shares, measures = own_shares(one, len(self.passage_of) - 1), None
        if self.rows is not None:
            (truth,) = truths(self.rows, [last_query(one.step, self.rows)], shares.exact.device)
            found = step_measures(
                attempt_of(one.selection.of_queries(slice(-1, None)), one.layout, truth), truth, self.wanted
            )
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
    """Return a step's last query, with keys and values of the tokens after the document, as reports take them."""
    split, sinks = rows.artifact.manifest.split, step.how[2]
    stored = split.sinks + split.tail
    return QueryBlock(
        queries=step.query[:, :, -1:].flatten(0, 1),
        keys=step.keys[:, stored:],
        values=step.values[:, stored:],
        visible=torch.tensor([step.keys.shape[1] - split.sinks]),
        sink_logits=None if sinks is None else sinks.flatten(),
    )


@dataclass(frozen=True)
class TokenRecord:
    """Record of one answer token in L layers.

    Attributes:
        totals: [3 or 4, L, Hk], the results of `Shares.totals`.
        passages: the passages with the largest shares, for each layer and KV head.
        chosen, missed: the selected and the missed tokens with the largest shares, for each layer and KV head.
        mean: the K passages with the largest means of shares over layers and KV heads.
        measures: `MEASURES` [4, L, Hk] float64, NaN where unknown.
    """

    totals: torch.Tensor
    passages: Largest
    chosen: Largest
    missed: Largest | None
    mean: Largest
    measures: torch.Tensor


@dataclass
class TokenRecorder:
    """Records answer tokens one after another from the steps of `layers` layers, which arrive in order of layer.

    All layers of a token are recorded together, because on a CPU the time of a record depends on the number of
    operations.
    """

    layers: int
    middle: int
    tokens: list[TokenRecord] = field(default_factory=list)
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    """Sums over answer tokens of the shares by passage [2 or 3, L, Hk, P]."""
    _steps: list[Reduced] = field(default_factory=list)

    def add(self, step: Reduced) -> None:
        """Add one layer's step; record the token when the steps of all layers have arrived."""
        self._steps.append(step)
        if len(self._steps) == self.layers:
            steps, self._steps = self._steps, []
            by_passage = torch.stack([one.by_passage for one in steps], 1)
            self.sums = self.sums + by_passage
            self.tokens.append(self._record(steps, by_passage))

    def _record(self, steps: list[Reduced], by_passage: torch.Tensor) -> TokenRecord:
        exact = torch.stack([one.shares.exact for one in steps])
        nowhere = torch.stack([one.shares.nowhere for one in steps])
        chosen, stood_for, *missed = by_passage.sum(-1)
        positions = _alike([one.shares.positions for one in steps], self.middle)
        weights = _alike([one.shares.chosen for one in steps], 0.0)
        return TokenRecord(
            totals=torch.stack([exact, chosen, stood_for + nowhere, *missed]),
            passages=largest_passages(by_passage, MOST_IN_RECORD),
            chosen=largest(weights, MOST_CHOSEN, positions),
            missed=_together([one.missed for one in steps if one.missed is not None]),
            mean=largest_passages(by_passage.mean((1, 2)), MOST_IN_MEAN),
            measures=self._measures(steps),
        )

    def _measures(self, steps: list[Reduced]) -> torch.Tensor:
        known = [one.measures for one in steps if one.measures is not None]
        if known:
            return torch.stack(known, 1)
        exact = steps[0].shares.exact
        read = torch.stack([torch.as_tensor(one.rows_read, device=exact.device).expand_as(exact) for one in steps])
        unknown = torch.full((len(MEASURES) - 1, *read.shape), torch.nan, dtype=torch.float64, device=exact.device)
        return torch.cat([unknown, read.double()[None] / (2 * self.middle)])


def _alike(rows: list[torch.Tensor], filler: float) -> torch.Tensor:
    """Stack the rows [Hk, R] of all layers to [L, Hk, R], padded with `filler` where a layer has fewer columns."""
    most = max(one.shape[1] for one in rows)
    return torch.stack([pad(one, (0, most - one.shape[1]), value=filler) for one in rows])


def _together(layers: list[Largest]) -> Largest | None:
    """Stack the places [Hk, K] of all layers to [L, Hk, K], and the shares likewise; return None for no layers."""
    if not layers:
        return None
    return Largest(torch.stack([one.places for one in layers]), torch.stack([one.shares for one in layers], 1))
