"""Measure recall, attention mass and output error of methods on one layer, compared with dense attention.

Each layer is measured on its own queries, keys and values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from math import lcm
from typing import Any

import torch

from sparsekv.formats.device import read_ahead
from sparsekv.formats.index.reader import CPU, Artifact
from sparsekv.formats.index.schema import LayerFacts, layer_file
from sparsekv.kernels.scores.logits import attention_logits, softmax_with_logsumexp
from sparsekv.runtime.attention.guard import Attempt, Guard, Outcome, missed_share
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.prepare import prepare_layer
from sparsekv.runtime.selection.interface import (
    Budget,
    CentroidSegment,
    MethodSpec,
    Queries,
    RowSet,
    Selection,
    Selector,
)
from sparsekv.runtime.selection.wrappers import unite_groups

CHECKED_AHEAD = 8  # layers whose files are checked while one is measured


def checked_rows(
    artifact: Artifact, names: Iterable[str], layers: list[int], device: torch.device
) -> Iterator[LayerRows]:
    """Yield the keys and values of each layer on a device. The next layer is prefetched.

    Threads verify the checksums of several layers at once, because a GPU measures a layer faster than one core hashes
    the layer's keys.

    Args:
        names: methods whose files are checked too.

    Raises:
        ArtifactError: the content of a file has changed.
    """
    names = list(names)

    def check(layer: int) -> int:
        artifact.check_sums(measured_files(artifact, names, [layer]))
        return layer

    def read(layer: int) -> LayerRows:
        rows = LayerRows(artifact, layer)
        rows.on(device)
        return rows

    return read_ahead(read_ahead(layers, check, CHECKED_AHEAD), read, 1)


def measured_files(artifact: Artifact, names: Iterable[str], layers: Iterable[int]) -> list[str]:
    """Return the names of the index's files that a measurement of methods on some layers reads."""
    folders = ["context", "queries", *(name for name in names if name in artifact.manifest.methods)]
    return [layer_file(folder, layer) for folder in folders for layer in layers]


@dataclass(frozen=True)
class QueryBlock:
    """Q queries of one layer. Each query attends to all sinks, all tokens between sinks and tail, and later tokens.

    Attributes:
        queries: [Hq, Q, D].
        keys, values: [Hk, E, D], of E new tokens after the tail. Queries of the tail have none (E = 0).
        visible: [Q], number of tail and new tokens that each query attends to.
        sink_logits: [Hq], logits of learned attention sinks; None if the model has none.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    visible: torch.Tensor
    sink_logits: torch.Tensor | None

    def part(self, queries: slice, device: torch.device) -> "QueryBlock":
        sinks = None if self.sink_logits is None else self.sink_logits.to(device)
        asked, visible = self.queries[:, queries].to(device), self.visible[queries].to(device)
        return QueryBlock(asked, self.keys.to(device), self.values.to(device), visible, sinks)


def tail_block(artifact: Artifact, layer: int, *, calibration: bool = False) -> QueryBlock:
    """Return the queries of the tail's second half (held out), or with `calibration` of the tail's first half."""
    stored, tail = artifact.queries(layer), artifact.manifest.split.tail
    keys, values = artifact.context_rows(layer).part(slice(0, 0))
    first, stop = (0, tail // 2) if calibration else (tail // 2, tail)
    return QueryBlock(
        queries=stored["tail"][:, first:stop],
        keys=keys,
        values=values,
        visible=torch.arange(first, stop) + 1,
        sink_logits=stored.get("sink_logits"),
    )


def seen_block(artifact: Artifact, layer: int) -> QueryBlock | None:
    """Read the last T / 2 of the document's queries from which the index was built; T is the number of tail tokens.

    Measurements place these queries directly after the tokens between sinks and tail. Returns None if the index stores
    no queries.
    """
    name = layer_file("samples", layer)
    if name not in artifact.manifest.files:
        return None
    keys, values = artifact.context_rows(layer).part(slice(0, 0))
    queries = artifact.tensors(name)["queries"][:, -(artifact.manifest.split.tail // 2) :]
    return QueryBlock(
        queries=queries,
        keys=keys,
        values=values,
        visible=torch.zeros(queries.shape[1], dtype=torch.int64),
        sink_logits=artifact.queries(layer).get("sink_logits"),
    )


class MeasuredQueries:
    """The queries of a report, from the tail or from questions. `blocks(layer)` returns the queries of one layer.

    Args:
        given: for each layer, the blocks of the questions' queries, such as one block for each question; None: measure
            on the held-out queries of the tail.
        apart: whether each query of a block is of another question. Otherwise a block's queries are consecutive.
    """

    def __init__(
        self, artifact: Artifact, given: Mapping[int, Sequence[QueryBlock]] | None = None, *, apart: bool = False
    ):
        self.artifact, self._given, self.apart = artifact, given, apart

    def blocks(self, layer: int) -> Sequence[QueryBlock]:
        return [tail_block(self.artifact, layer)] if self._given is None else self._given[layer]

    def __len__(self) -> int:
        return sum(block.queries.shape[1] for block in self.blocks(self.artifact.manifest.indexed_layers[0]))


@dataclass(frozen=True)
class MeasuredSetting:
    """A variant of a method at a budget, with the options of its measurement.

    Attributes:
        guard: limits the missed mass of a head.
        reference: recall and `list_coverage` count the oracle's tokens at this budget; None: at `budget`.
        outputs: compute attention outputs. If False, output error and missed estimate are NaN.
        together: number of queries that share the union of their selections.
    """

    form: MethodSpec
    budget: Budget
    guard: Guard | None = None
    reference: Budget | None = None
    outputs: bool = True
    together: int = 1


@dataclass
class Measures:
    """Sums of each measure over queries, by the measure's name. Each sum is [Hk] float64."""

    queries: int = 0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, **per_query: torch.Tensor) -> None:
        """Add values [Hk, Q] of each measure. An unknown value is NaN."""
        self.queries += next(iter(per_query.values())).shape[1]
        for name, values in per_query.items():
            self.sums[name] = self.sums.get(name, 0) + values.double().sum(1)

    def means(self) -> dict[str, torch.Tensor]:
        """Compute the mean of each measure over queries, [Hk] on the CPU, with one sync."""
        means = torch.stack([*self.sums.values()]).cpu() / self.queries
        return dict(zip(self.sums, means, strict=True))


LOGITS_AT_ONCE = 64 * 2**20  # elements of [Hq, Q, N] float32 logits: 256 MB
PIECE = 4096  # tokens per matrix product when a GPU computes a long sum


@dataclass(frozen=True)
class Truth:
    """Queries and their dense attention. The exact rows are those of sinks, tail and later tokens.

    Attributes:
        logits: [Hk, G, Q, M], logits of the tokens between sinks and tail (the middle).
        exact_logsumexp: [Hk, G, Q], log-sum-exp of the logits of the exact rows and of learned attention sinks.
        exact_output: [Hk, G, Q, D], output of attention to the exact rows and learned attention sinks alone.
        probability: [Hk, Q, M], attention probability of the middle's tokens, mean over the G query heads of a KV head.
        output: [Hk, G, Q, D], output of dense attention.
        values: [Hk, M, D], values of the middle.
        begins: whether the queries are the first of their block.
        oracles: cache of the results of `oracle`, by number of tokens.
    """

    queries: Queries
    logits: torch.Tensor
    exact_logsumexp: torch.Tensor
    exact_output: torch.Tensor
    probability: torch.Tensor
    output: torch.Tensor
    values: torch.Tensor
    facts: LayerFacts
    begins: bool
    oracles: dict[int, torch.Tensor] = field(default_factory=dict)

    def oracle(self, tokens: int) -> torch.Tensor:
        """Return a mask [Hk, Q, M] bool of the `tokens` tokens with the highest probability."""
        if tokens not in self.oracles:
            best = self.probability.topk(tokens, -1).indices
            self.oracles[tokens] = torch.zeros_like(self.probability, dtype=torch.bool).scatter_(-1, best, True)
        return self.oracles[tokens]


def truths(rows: LayerRows, blocks: Iterable[QueryBlock], device: torch.device, multiple: int = 1) -> Iterator[Truth]:
    """Compute dense attention of the queries of all blocks, batch by batch. Batches are numbered from 0.

    A batch has as many queries of one block as `LOGITS_AT_ONCE` allows in the layer with the most query heads, rounded
    down to a multiple of `multiple`, but at least `multiple`. So a batch has the same queries in each layer, and
    methods that share selections between layers find them by the batch's number. If the number of a block's queries is
    no such multiple, its last batch also has the queries that are left over.
    """
    batches, manifest = count(), rows.artifact.manifest
    Hq = max(manifest.files[layer_file("queries", layer)].tensors["tail"].shape[0] for layer in manifest.indexed_layers)
    step = max(1, LOGITS_AT_ONCE // (Hq * manifest.split.tokens) // multiple) * multiple
    for block in blocks:
        queries = block.queries.shape[1]
        edges = [*range(0, max(min(1, queries), queries - multiple + 1), step), queries]
        for start, stop in pairwise(edges):
            yield _truth(rows, block.part(slice(start, stop), device), next(batches), begins=start == 0)


def _truth(rows: LayerRows, block: QueryBlock, batch: int, *, begins: bool) -> Truth:
    manifest = rows.artifact.manifest
    facts, split = manifest.attending[rows.layer], manifest.split
    keys, values = rows.on(block.queries.device)
    middle = slice(split.sinks, split.sinks + split.middle)
    exact = [
        torch.cat([stored[:, : split.sinks], stored[:, middle.stop :], new.to(stored)], 1)
        for stored, new in ((keys, block.keys), (values, block.values))
    ]
    grouped = block.queries.unflatten(0, (keys.shape[0], -1)).to(keys)
    visible = torch.arange(exact[0].shape[1], device=keys.device) < split.sinks + block.visible[:, None]
    exact_logits = attention_logits(grouped, exact[0], *facts.scaling)
    exact_logits = exact_logits.masked_fill(~visible, -torch.inf)
    weights = exact_logits.softmax(-1)
    exact_lse = exact_logits.logsumexp(-1)
    if block.sink_logits is not None:
        sinks = block.sink_logits.view(keys.shape[0], -1)[..., None].float()
        with_sinks = torch.logaddexp(exact_lse, sinks)
        weights = weights * (exact_lse - with_sinks).exp()[..., None]
        exact_lse = with_sinks
    logits = attention_logits(grouped, keys[:, middle], *facts.scaling)
    (probability, beside), _ = joint_softmax([logits, exact_lse[..., None]])
    exact_output = weighted(weights, exact[1])
    output = weighted(probability, values[:, middle]) + exact_output * beside
    positions = middle.stop - 1 + block.visible
    queries = Queries(grouped, lambda: positions, lambda: exact_lse, joint=False, batch=batch)
    mean, of_middle = probability.mean(1), values[:, middle]
    return Truth(queries, logits, exact_lse, exact_output, mean, output, of_middle, facts, begins)


def joint_softmax(parts: list[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Compute one softmax over parts [..., T] of the logits; return each part's weights, and the log-sum-exp [...]."""
    weights, total = softmax_with_logsumexp(torch.cat(parts, -1))
    return weights.split([part.shape[-1] for part in parts], -1), total


def weighted(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the sums [Hk, G, Q, D] of values [Hk, T, D] with weights [Hk, G, Q, T], in float32."""
    Hk, G, Q, tokens = weights.shape
    # A GPU computes one long matrix product on only about a dozen of its SMs, so the product is split into pieces.
    piece = PIECE if weights.is_cuda else tokens
    return sum_in_pieces(weights.flatten(1, 2), values.float(), piece).view(Hk, G, Q, -1)


def sum_in_pieces(weights: torch.Tensor, values: torch.Tensor, piece: int) -> torch.Tensor:
    """Return the sums [Hk, R, D] of values [Hk, T, D] with weights [Hk, R, T], added up in pieces of `piece` tokens."""
    whole = values.shape[1] // piece * piece if piece < values.shape[1] else 0
    sums = torch.bmm(weights[..., whole:], values[:, whole:])
    if whole:
        pieces = weights[..., :whole].unflatten(-1, (-1, piece)).transpose(1, 2)  # [Hk, P, R, piece]
        sums += torch.matmul(pieces, values[:, :whole].unflatten(1, (-1, piece))).sum(1)
    return sums


SharedStates = dict[tuple[str, str], dict[str, Any]]
"""State of a method that all layers share, by method name and variant."""


def measure_layer(
    rows: LayerRows,
    measured: list[MeasuredSetting],
    blocks: Iterable[QueryBlock],
    states: SharedStates | None = None,
    device: torch.device = CPU,
) -> dict[MeasuredSetting, Measures]:
    """Measure settings on one layer, on a device. Raises the errors of `prepare_layer`.

    The method of a setting with `together` above 1 must be able to unite selections.

    Allocates several tensors of 256 MB for logits, or of one batch of queries if that is more. On a GPU, also allocates
    the layer's keys and values.

    Args:
        states: state shared with the layers that were measured before this one.
    """
    states = {} if states is None else states
    selectors: dict[MethodSpec, Selector] = {}
    for form in dict.fromkeys(one.form for one in measured):
        shared = states.setdefault((form.name, form.variant), {})
        prepared = prepare_layer(rows, form, device, shared)
        selectors[form] = prepared.selector
    results = {one: Measures() for one in measured}
    # A batch must not end between queries that share a selection: queries of a group, or of the steps of one search.
    multiple = lcm(*(one.together for one in measured), *(one.form.method.cycle() for one in measured))
    for truth in truths(rows, blocks, device, multiple):
        for selector in selectors.values() if truth.begins else ():
            if (state := selector.conversation) is not None:
                state.forget()
        for one in measured:
            _measure(one, selectors[one.form], truth, results[one])
    return results


def _measure(one: MeasuredSetting, selector: Selector, truth: Truth, into: Measures) -> None:
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
    """Return the measures [Hk, Q] of one attempt by name, compared with dense attention.

    Args:
        attempt: the result of `attempt_of`.
        wanted: number of the oracle's tokens that recall counts.
    """
    (chosen, output), dense = attempt.results, truth.output.transpose(1, 2)
    apart, size = (output - dense).norm(dim=-1), dense.norm(dim=-1)
    # If the dense output of a head is zero, the relative error is 0 for an output of zero, and 1 for any other.
    error = torch.where((size == 0) & ~apart.isnan(), (apart > 0).to(apart.dtype), apart / size)
    seen, whole = (truth.probability * chosen).sum(-1), truth.probability.sum(-1)
    # Probabilities can all be zero in float32. The tokens then count alike.
    mass = torch.where(whole == 0, chosen.float().mean(-1), seen / whole)
    return {
        "selected_tokens": chosen.sum(-1),
        "recall": (chosen & truth.oracle(wanted)).sum(-1) / wanted,
        "attention_mass": mass,
        "output_error": error.mean(-1),
        "kv_fraction": attempt.rows / (2 * truth.logits.shape[-1]),
        "missed_mass": whole - seen,
        "missed_estimate": attempt.missed,
    }


def _coverage(selector: Selector, truth: Truth, wanted: int) -> torch.Tensor:
    """Return the share [Hk, Q] of the oracle's `wanted` tokens that the selector scores.

    Returns NaN if the selector does not report which tokens it scores.
    """
    report = selector.report
    if report is None or report.covered is None:
        return torch.full_like(truth.probability[..., 0], torch.nan)
    return (report.covered(truth.queries) & truth.oracle(wanted)).sum(-1) / wanted


def _attempt(selector: Selector, truth: Truth, budget: Budget, *, outputs: bool, together: int) -> Attempt:
    selection = selector.select(truth.queries, budget)
    if together > 1:
        selection = unite_groups(selection, selector, truth.logits.shape[-1], together)
    return attempt_of(selection, selector.layout, truth, outputs=outputs)


def attempt_of(selection: Selection, layout: torch.Tensor | None, truth: Truth, *, outputs: bool = True) -> Attempt:
    """Compute the result of a selection: selected tokens [Hk, Q, M] bool, and attention output [Hk, Q, G, D].

    The selected tokens are in the order of positions. Without `outputs`, the output and the missed mass are NaN. The
    missed mass is also NaN if the selection has no centroids of the unselected tokens.

    Args:
        selection: the selection for the queries of `truth`.
        layout: [Hk, M], the middle position of each stored row, to which the selection's row indices refer; None: order
            of position.
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
    """Return the positions of the selected rows [Hk, Q or 1, capacity], counted from the first token after the sinks.

    Unused slots have the value M, one past the last position, so that scattering to them changes no token.
    """
    positions, valid = rows.expand()
    if layout is not None:
        positions = layout[:, None].expand(-1, positions.shape[1], -1).gather(-1, positions)
    return positions if valid is None else torch.where(valid, positions, middle)


def _chosen(positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a mask [Hk, Q, M] bool, in the order of positions, of the tokens at the selected `positions`.

    `like` is a tensor of the mask's shape and device.
    """
    chosen = like.new_zeros(*like.shape[:-1], like.shape[-1] + 1, dtype=torch.bool)
    return chosen.scatter_(-1, positions.expand(-1, like.shape[1], -1), True)[..., :-1]


def _sparse_output(
    chosen: torch.Tensor,
    truth: Truth,
    log_weights: torch.Tensor | None,
    positions: torch.Tensor,
    rest: Sequence[CentroidSegment],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with one softmax to selected tokens, exact rows (sinks, tail, later tokens) and the centroids `rest`.

    Returns the output [Hk, G, Q, D] and the log-sum-exp [Hk, G, Q] of the logits.
    """
    logits = truth.logits.masked_fill(~chosen[:, None], -torch.inf)
    if log_weights is not None:
        weights = logits.new_zeros(*logits.shape[:-1], logits.shape[-1] + 1)
        shape = *logits.shape[:-1], positions.shape[-1]
        weights.scatter_(-1, positions[:, None].expand(shape), log_weights.expand(shape))
        logits = logits + weights[..., :-1]
    parts = [(logits, truth.values)]
    for one in rest:
        logits = attention_logits(truth.queries.query, one.keys, *truth.facts.scaling)
        parts.append((logits + one.log_counts[:, None], one.values))
    (beside, *shares), total = joint_softmax([truth.exact_logsumexp[..., None], *(logits for logits, _ in parts)])
    output = truth.exact_output * beside
    for weights, (_, values) in zip(shares, parts, strict=True):
        output = output + weighted(weights, values)
    return output, total
