"""Measures methods against dense attention on one layer: recall, attention mass, output error and more, per KV head.

The oracle's top-K are the K middle tokens of highest probability, averaged over the query group after the softmax over
everything the query sees; K is the method's own budget, or one reference budget for all methods. Recall is the share of
these tokens that is chosen. Attention mass is the share of the middle's probability that is chosen. Output error is
|o_sparse - o_dense| / |o_dense| per query head, with sinks, tail and new tokens exact in both. KV fraction is the bytes
read for the middle, index included, over the bytes that dense attention reads for it. Missed mass is the share of all
attention on middle tokens that are not chosen: the true one, and the estimate that a decode step can make.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sparsekv.formats.reader import CPU
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.attention.guard import Attempt, Outcome, missed_share
from sparsekv.runtime.cache.layer_rows import LayerRows
from sparsekv.runtime.decoding.prepare import prepare_layer
from sparsekv.runtime.reporting.measures import Measured, Measures
from sparsekv.runtime.reporting.queries import QueryBlock
from sparsekv.runtime.reporting.truth import Truth, joint_softmax, truths, weighted
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.capabilities import Covers
from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.selection.interface import Selector
from sparsekv.runtime.selection.selection import CentroidSegment, RowSet, Selection
from sparsekv.runtime.selection.union import can_unite, unite_groups

SharedStates = dict[tuple[str, str], dict[str, Any]]
"""The state shared by all layers, for each method and variant."""


def measure_layer(
    rows: LayerRows,
    measured: list[Measured],
    blocks: Iterable[QueryBlock],
    states: SharedStates | None = None,
    device: torch.device = CPU,
) -> dict[Measured, Measures]:
    """Measure all methods and budgets on one layer, on a device.

    Allocates 256 MB of logits at a time, a few times over; on a GPU also the layer's keys and values.

    Args:
        states: state shared with the layers measured before this one.
    """
    states = {} if states is None else states
    selectors: dict[Form, Selector] = {}
    for form in dict.fromkeys(one.form for one in measured):
        shared = states.setdefault((form.name, form.variant), {})
        prepared = prepare_layer(rows, form.name, form.method, device, residual=form.residual, shared=shared)
        selectors[form] = prepared.selector
    measured = [one for one in measured if one.together == 1 or can_unite(one.form.method, selectors[one.form])]
    results = {one: Measures() for one in measured}
    for truth in truths(rows, blocks, device, at_least=max((one.together for one in measured), default=1)):
        for one in measured:
            _measure(one, selectors[one.form], truth, results[one])
    return results


def _measure(one: Measured, selector: Selector, truth: Truth, into: Measures) -> None:
    def attempt(budget: Budget) -> Attempt:
        return _attempt(selector, truth, budget, outputs=one.outputs, together=one.together)

    middle = truth.logits.shape[-1]
    if one.guard is None:
        first = attempt(one.budget)
        nowhere = torch.full_like(first.missed, torch.nan)
        outcome = Outcome(first, nowhere, nowhere)
    else:
        outcome = one.guard.enforce(attempt, lambda heads: _whole(truth), one.budget, middle)
    wanted = (one.reference or one.budget).tokens(middle)
    into.add(
        **step_measures(outcome.attempt, truth, wanted),
        list_coverage=_coverage(selector, truth, wanted),
        raised=outcome.raised,
        dense=outcome.dense,
    )


def step_measures(attempt: Attempt, truth: Truth, wanted: int) -> dict[str, torch.Tensor]:
    """What one attempt keeps of dense attention, by measure [Hk, Q].

    Args:
        attempt: as `attempt_of` gives it.
        wanted: how many of the oracle's tokens count for recall.
    """
    (chosen, output), dense = attempt.results, truth.output.transpose(1, 2)
    apart, size = (output - dense).norm(dim=-1), dense.norm(dim=-1)
    # A head may have no values: then what it gives is right, or all wrong.
    error = torch.where((size == 0) & ~apart.isnan(), (apart > 0).to(apart.dtype), apart / size)
    seen, whole = (truth.probability * chosen).sum(-1), truth.probability.sum(-1)
    return {
        "selected_tokens": chosen.sum(-1),
        "recall": (chosen & truth.oracle(wanted)).sum(-1) / wanted,
        "attention_mass": seen / whole,
        "output_error": error.mean(-1),
        "kv_fraction": attempt.rows / (2 * truth.logits.shape[-1]),
        "missed_mass": whole - seen,
        "missed_estimate": attempt.missed,
    }


def _coverage(selector: Selector, truth: Truth, wanted: int) -> torch.Tensor:
    """[Hk, Q]: the share of the oracle's tokens that the selector scores; NaN where it scores all."""
    reach = selector.covered(truth.queries) if isinstance(selector, Covers) else None
    if reach is None:
        return torch.full_like(truth.probability[..., 0], torch.nan)
    return (reach & truth.oracle(wanted)).sum(-1) / wanted


def _attempt(selector: Selector, truth: Truth, budget: Budget, *, outputs: bool, together: int) -> Attempt:
    selection = selector.select(truth.queries, budget)
    if together > 1:
        selection = unite_groups(selection, selector, truth.logits.shape[-1], together)
    return attempt_of(selection, selector.layout, truth, outputs=outputs)


def attempt_of(selection: Selection, layout: torch.Tensor | None, truth: Truth, *, outputs: bool = True) -> Attempt:
    """What a selection for the queries of `truth` chooses [Hk, Q, M] bool, in order of position, and its output
    [Hk, Q, G, D]. Without `outputs` output and missed share are NaN; the missed share also without centroids of the
    rest.

    Args:
        layout: of the selection's rows, `Selector.layout`.
    """
    positions = chosen_positions(selection.rows, layout, truth.logits.shape[-1])
    chosen = _chosen(positions, truth.probability)
    rows = 2 * chosen.sum(-1) + selection.cost.index_rows
    if not outputs:
        nothing = torch.full_like(truth.output, torch.nan)
        return Attempt(nothing[:, 0, :, 0], rows, (chosen, nothing.transpose(1, 2)))
    rest = () if selection.rest is None else selection.rest.segments()
    attended = selection.rest is not None and selection.rest.attended
    weights = selection.rows.log_weights
    output, total = _sparse_output(chosen, truth, weights, positions, rest if attended else ())
    missed = missed_share(rest, truth.queries.query, total, truth.facts, attended=attended)
    return Attempt(missed, rows, (chosen, output.transpose(1, 2)))


def _whole(truth: Truth) -> Attempt:
    everything = torch.ones_like(truth.probability, dtype=torch.bool)
    rows = 2 * everything.sum(-1)
    return Attempt(torch.zeros_like(truth.probability[..., 0]), rows, (everything, truth.output.transpose(1, 2)))


def chosen_positions(rows: RowSet, layout: torch.Tensor | None, middle: int) -> torch.Tensor:
    """[Hk, Q or 1, capacity] middle positions of the chosen rows; unused slots are M, one past the last position, so
    that scattering to them changes no token."""
    positions, valid = rows.expand()
    if layout is not None:
        positions = layout[:, None].expand(-1, positions.shape[1], -1).gather(-1, positions)
    return positions if valid is None else torch.where(valid, positions, middle)


def _chosen(positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[Hk, Q, M] bool: whether each token is among the chosen positions, in order of position."""
    chosen = like.new_zeros(*like.shape[:-1], like.shape[-1] + 1, dtype=torch.bool)
    return chosen.scatter_(-1, positions.expand(-1, like.shape[1], -1), True)[..., :-1]


def _sparse_output(
    chosen: torch.Tensor,
    truth: Truth,
    log_weights: torch.Tensor | None,
    positions: torch.Tensor,
    rest: Sequence[CentroidSegment],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [Hk, G, Q, D] and log-sum-exp [Hk, G, Q] of one softmax over chosen tokens, exact rows and centroids of
    the rest."""
    logits = truth.logits.masked_fill(~chosen[:, None], -torch.inf)
    if log_weights is not None:
        weights = logits.new_zeros(*logits.shape[:-1], logits.shape[-1] + 1)
        shape = *logits.shape[:-1], positions.shape[-1]
        weights.scatter_(-1, positions[:, None].expand(shape), log_weights.expand(shape))
        logits = logits + weights[..., :-1]
    parts = [(logits, truth.values)]
    for one in rest:
        logits = attention_logits(truth.queries.query, one.keys, truth.facts.softmax_scale, truth.facts.softcap)
        parts.append((logits + one.log_counts[:, None], one.values))
    (beside, *shares), total = joint_softmax([truth.exact_logsumexp[..., None], *(logits for logits, _ in parts)])
    output = truth.exact_output * beside
    for weights, (_, values) in zip(shares, parts, strict=True):
        output = output + weighted(weights, values)
    return output, total
