"""Recall report: measures of each method, variant and budget on all layers, and the Pareto front."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from statistics import fmean
from typing import Any

import torch

from sparsekv.formats.errors import ArtifactError, UsageError
from sparsekv.formats.index.reader import CPU, Artifact
from sparsekv.formats.index.schema import KVStorage
from sparsekv.runtime.attention.guard import Guard, estimates_missed
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.prepare import stored_context
from sparsekv.runtime.reporting.recall import (
    MeasuredQueries,
    MeasuredSetting,
    SharedStates,
    checked_rows,
    measure_layer,
    seen_block,
    tail_block,
)
from sparsekv.runtime.selection.cluster_statistics import Clustering, ListShape
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec, methods


@dataclass(frozen=True)
class LayerDescription:
    """Statistics of one layer's clusters and posting lists for one method; a field is None if the method lacks them."""

    layer: int
    clusters: Clustering | None
    lists: ListShape | None


def describe_layers(
    artifact: Artifact, name: str, biggest: int, device: torch.device = CPU
) -> Iterator[LayerDescription]:
    """Yield the statistics of each indexed layer for the method `name`, computed on a device.

    Reads, layer by layer, values between sinks and tail, the method's tensors and, for clusters and lists, keys.
    """
    method = methods()[name]
    for layer in artifact.manifest.indexed_layers:
        rows = LayerRows(artifact, layer)
        context, middle = stored_context(rows, name, device), rows.middle("values", device)
        queries = tail_block(artifact, layer).queries.unflatten(0, (len(middle), -1)).to(device)
        clusters, lists = method.describe_clusters(context, middle, biggest), method.describe_lists(context, queries)
        yield LayerDescription(layer, clusters, lists)


GROUPS = ("layer", "kv_head")
"""Fields by which rows can be grouped before they are averaged."""


@dataclass(frozen=True)
class RecallRow:
    """Measures of one method at one budget. `layer` is None in a mean over layers, `kv_head` in a mean over KV heads.

    Attributes:
        budget_tokens: the budget as a number of tokens.
        selected_tokens: number of tokens that the method selects in a step, for all of its `together` queries.
        recall: share of the oracle's tokens that the method selects.
        attention_mass: dense attention's weight on the selected tokens, divided by its weight on all tokens between
            sinks and tail.
        output_error: norm of the difference between the attention output and dense attention's output, divided by the
            norm of dense attention's output.
        kv_fraction: number of D-sized rows that a step reads, from the index and from the keys and values between
            sinks and tail (the middle), divided by the number of the middle's key and value rows.
        missed_mass: dense attention's weight on the tokens between sinks and tail that were not selected, from 0 to 1.
        missed_estimate: estimated missed mass; None without centroids of the unselected tokens.
        recall_seen: recall on the queries of `seen_block`, from which the index was built. None if the index stores no
            queries, if the method does not learn from them, or if they are fewer than `together`.
        list_coverage: share of the oracle's tokens that are in the posting lists read; None without posting lists.
        raised: share of a head's queries over the guard's limit at the first budget; None without a guard.
        dense: share of a head's queries to which the guard gave dense attention; None without a guard.
        together: number of queries that share the union of their selections.
    """

    method: str
    variant: str
    budget: float | int
    budget_tokens: int
    selected_tokens: float
    recall: float
    attention_mass: float
    output_error: float
    kv_fraction: float
    missed_mass: float
    missed_estimate: float | None
    recall_seen: float | None
    list_coverage: float | None
    raised: float | None
    dense: float | None
    layer: int | None
    kv_head: int | None
    together: int

    @property
    def name(self) -> str:
        """Label of a line or row: the method, its variant, and the number of queries that share a selection."""
        shared = f"{self.together} together" if self.together > 1 else ""
        return " ".join(part for part in (self.method, self.variant, shared) if part)


SHOWN = 3
"""Decimals of a KV fraction in tables. A limit on KV fractions holds for the numbers that a reader sees."""
MEASURES = tuple(one.name for one in fields(RecallRow) if one.type in (float, float | None))
"""Names of the measures: the fields of a row that are averaged."""


@dataclass(frozen=True)
class RecallReport:
    """A recall report: one row for each method, variant, budget, layer and KV head.

    `n_context` is the number of tokens of the context, `n_middle` the number of tokens between sinks and tail, and
    `n_queries` the number of measured queries. `prefill` names the attention with which the context was prefilled.
    `kv_storage` has the errors of int8 storage. It is None if keys and values are stored in the index's dtype.
    """

    index: str
    model: str
    n_context: int
    n_middle: int
    n_queries: int
    prefill: str
    kv_storage: KVStorage | None
    rows: list[RecallRow]

    def by(self, *names: str) -> list[RecallRow]:
        """Return mean rows per `layer`, per `kv_head`, or per both; without names, means over all layers and heads."""
        groups: dict[RecallRow, list[RecallRow]] = {}
        for row in self.rows:
            group: dict[str, Any] = dict.fromkeys(MEASURES, 0.0)
            group |= {name: getattr(row, name) if name in names else None for name in GROUPS}
            groups.setdefault(replace(row, **group), []).append(row)
        return [_mean(group, rows) for group, rows in groups.items()]

    def best_within(self, kv_fraction: float) -> RecallRow | None:
        """Return the first row of `ranked_within`, which has the lowest output error; None if there is no row."""
        return next(iter(self.ranked_within(kv_fraction)), None)

    def ranked_within(self, kv_fraction: float) -> list[RecallRow]:
        """Return the mean rows whose KV fraction, rounded as in tables, is at most `kv_fraction`, by output error.

        Bounds such as the oracle, and rows in which several queries share a selection, are excluded.
        """
        alone = [row for row in self.by() if row.together == 1 and not methods()[row.method].is_bound]
        return sorted(
            (row for row in alone if round(row.kv_fraction, SHOWN) <= kv_fraction), key=lambda row: row.output_error
        )


def _mean(group: RecallRow, rows: list[RecallRow]) -> RecallRow:
    def mean(name: str) -> float | None:
        values = [getattr(row, name) for row in rows]
        return None if None in values else fmean(values)

    means: dict[str, Any] = {name: mean(name) for name in MEASURES}
    return replace(group, **means)


@torch.inference_mode()
def recall_report(
    artifact: Artifact,
    names: list[str],
    budgets: list[Budget],
    queries: MeasuredQueries,
    progress: Callable[[int, int], None] = lambda done, of: None,
    *,
    residual: bool = False,
    guard: Guard | None = None,
    configured: Mapping[str, tuple[str, Method]] | None = None,
    together: Sequence[int] = (1,),
    device: torch.device = CPU,
    note: Callable[[str], None] = lambda line: None,
) -> RecallReport:
    """Measure methods by name at each budget, layer by layer, on a device. Needs the memory of one layer.

    Args:
        queries: queries of the held-out tail, or of the user's questions. Every method is measured on the same queries.
        progress: called with the number of measured layers and the total.
        residual: also measure variants with a residual: centroids represent unselected tokens (see `forms`).
        guard: also measure, under this guard, each variant whose missed mass can be estimated. Methods without such a
            variant are left out.
        configured: for some methods, by name, a label and the only variant to measure. All variants of other methods
            are measured.
        together: measure each variant once for each of these numbers of queries, which then share the union of their
            selections. The queries of a group are evenly spread over a batch of `truths`. Methods that cannot share,
            and variants under a guard, are left out for numbers above 1.
        note: called with a line that names the methods that `guard` leaves out, and with one that names the variants
            that are left out for numbers above 1, if there are any.

    Raises:
        UsageError: `residual` is set, and the index has no value centroids or no method drops tokens. Or `guard` leaves
            out all methods, or `together` all variants.
        ArtifactError: dense attention of a layer is not finite, or the errors of `checked_rows` and `prepare_layer`.
    """
    manifest = artifact.manifest
    compared = [
        form for name in names for form in forms(artifact, name, (configured or {}).get(name), residual=residual)
    ]
    if residual and not any(form.residual for form in compared):
        raise UsageError(
            f"--residual has no effect: {', '.join(names)} already represent the tokens that are not selected; leave "
            "the option out"
        )
    if guard is not None:
        _refuse_unguarded(compared, note)
    measured = _together(_measured(compared, budgets, guard), together, note, apart=queries.apart)
    layers = manifest.indexed_layers
    rows: list[RecallRow] = []
    states: SharedStates = {}
    for done, stored in enumerate(checked_rows(artifact, names, layers, device), 1):
        layer = stored.layer
        seen = _recall_seen(stored, measured, device)
        for one, measures in measure_layer(stored, measured, queries.blocks(layer), states, device).items():
            means = measures.means()
            if not bool(means["missed_mass"].isfinite().all()):
                raise ArtifactError(
                    f"attention in layer {layer} of {artifact.folder} is not finite, so there is nothing to compare; "
                    "check the index with inspect --verify, and build it again if it is damaged"
                )
            means["recall_seen"] = seen.get(one, torch.full_like(means["recall"], torch.nan))
            rows += _rows(one, manifest.split.middle, layer, means)
        progress(done, len(layers))
    return RecallReport(
        index=str(artifact.folder),
        model=manifest.model.id,
        n_context=manifest.split.tokens,
        n_middle=manifest.split.middle,
        n_queries=len(queries),
        prefill=str(manifest.prefill),
        kv_storage=manifest.kv_storage,
        rows=rows,
    )


def forms(
    artifact: Artifact, name: str, configured: tuple[str, Method] | None = None, *, residual: bool
) -> list[MethodSpec]:
    """Return the variants of a method to compare: the configured variant, or else all variants of the method.

    With `residual`, the list also has each variant with a residual, unless one of the variants itself represents the
    tokens that it does not select.
    """
    record = artifact.manifest.methods.get(name)
    variants = dict([configured]) if configured else methods()[name].variants(record)
    found = [MethodSpec(name, variant, method) for variant, method in variants.items()]
    if residual and not any(method.replaces() for method in variants.values()):
        found += [replace(form, variant=f"{form.variant} + residual".strip(), residual=True) for form in found]
    return found


def _refuse_unguarded(compared: Sequence[MethodSpec], note: Callable[[str], None]) -> None:
    """Call `note` with a line that names the methods that no guard can limit, if there are any.

    Raises UsageError with this line if a guard can limit none of the methods.
    """
    limited = {form.name for form in compared if estimates_missed(form.method, residual=form.residual)}
    others = dict.fromkeys(form.name for form in compared if form.name not in limited)
    if not others:
        return
    line = f"--guard leaves out {', '.join(others)}: no step of these methods can estimate how much attention it misses"
    if not all(form.method.replaces() or form.residual for form in compared if form.name in others):
        line += "; with --residual, methods that drop tokens can"
    if not limited:
        raise UsageError(line)
    note(line)


def _measured(compared: list[MethodSpec], budgets: list[Budget], guard: Guard | None) -> list[MeasuredSetting]:
    """Return each variant at each budget, and again under the guard if the variant's missed mass can be estimated."""
    measured: list[MeasuredSetting] = []
    for _, of_method in groupby(compared, lambda form: form.name):
        plain = list(of_method)
        guarded: list[tuple[MethodSpec, Guard | None]] = [(form, None) for form in plain]
        if guard is not None:
            guarded += [
                (replace(form, variant=f"{form.variant} + guard".strip()), guard)
                for form in plain
                if estimates_missed(form.method, residual=form.residual)
            ]
        measured += [MeasuredSetting(form, budget, by) for form, by in guarded for budget in budgets]
    return measured


def _together(
    settings: Sequence[MeasuredSetting], together: Sequence[int], note: Callable[[str], None], *, apart: bool
) -> list[MeasuredSetting]:
    """Return each setting once for each number of queries in `together`, which share one selection.

    Settings whose queries cannot share a selection are left out for numbers above 1. If the queries are of different
    questions (`apart`), settings whose steps reuse a selection are left out for 1 too. If settings are left out, `note`
    is called with a line that names them. Raises UsageError with this line if no setting remains.
    """
    several = [number for number in together if number > 1]
    reusing = dict.fromkeys(one.form.title for one in settings if one.form.method.cycle() > 1)
    alone = dict.fromkeys(one.form.title for one in settings if one.guard or not one.form.method.can_unite()) | reusing
    measured = [
        replace(one, together=number)
        for one in settings
        for number in together
        if one.form.title not in alone or (number == 1 and not (apart and one.form.title in reusing))
    ]
    if several and alone:
        line = (
            f"--together {','.join(map(str, several))} leaves out {', '.join(alone)}: queries cannot share a guard, "
            "a selection that several steps reuse, or one query's representation of unselected tokens"
        )
        if apart and reusing:
            line += f"; leave --together out to measure {', '.join(reusing)}"
        elif 1 not in together:
            line += "; add 1 to --together to measure queries alone"
        if not measured:
            raise UsageError(line)
        note(line)
    return measured


def _recall_seen(
    rows: LayerRows, measured: list[MeasuredSetting], device: torch.device
) -> dict[MeasuredSetting, torch.Tensor]:
    """Return the recall [Hk] of methods that learn from queries, on the queries of `seen_block`.

    Settings of more queries together than this block has are left out.
    """
    learned = [one for one in measured if one.form.method.learns_queries]
    block = seen_block(rows.artifact, rows.layer) if learned else None
    if block is None:
        return {}
    learned = [one for one in learned if one.together <= block.queries.shape[1]]
    found = measure_layer(rows, learned, [block], device=device)
    return {one: measures.means()["recall"] for one, measures in found.items()}


def _rows(one: MeasuredSetting, middle: int, layer: int, means: dict[str, torch.Tensor]) -> list[RecallRow]:
    """Create one row for each KV head from the means [Hk] of each measure."""
    of_head: list[dict[str, Any]] = [
        {name: _known(float(values[kv_head])) for name, values in means.items()}
        for kv_head in range(len(means["recall"]))
    ]
    return [
        RecallRow(
            method=one.form.name,
            variant=one.form.variant,
            together=one.together,
            budget=one.budget.value,
            budget_tokens=one.budget.tokens(middle),
            layer=layer,
            kv_head=kv_head,
            **measures,
        )
        for kv_head, measures in enumerate(of_head)
    ]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def pareto_front(rows: Sequence[RecallRow]) -> list[RecallRow]:
    """Return the Pareto front in KV fraction and output error: the rows that no other row dominates.

    Only rows of the same layer, KV head and number of queries together are compared. Bounds such as the oracle are left
    out, because decoding cannot use them.
    """
    groups: dict[tuple[int | None, int | None, int], list[RecallRow]] = {}
    for row in rows:
        if not methods()[row.method].is_bound:
            groups.setdefault((row.layer, row.kv_head, row.together), []).append(row)
    return [row for group in groups.values() for row in _front(group)]


def _front(rows: list[RecallRow]) -> Iterator[RecallRow]:
    least, last = math.inf, (math.inf, math.inf)
    for row in sorted(rows, key=_costs):
        if row.output_error < least or _costs(row) == last:
            yield row
            least, last = row.output_error, _costs(row)


def _costs(row: RecallRow) -> tuple[float, float]:
    return row.kv_fraction, row.output_error


def row_records(rows: Sequence[RecallRow]) -> list[dict[str, Any]]:
    """Convert rows to flat dicts, in the same order. The key `front` holds whether a row is on the Pareto front."""
    front = set(pareto_front(rows))
    return [{**asdict(row), "front": row in front} for row in rows]


def in_order(rows: Sequence[RecallRow]) -> list[RecallRow]:
    """Sort rows by layer, KV head, budget, number of queries together, and output error."""

    def key(row: RecallRow) -> tuple[float, ...]:
        place = [-1 if number is None else number for number in (row.layer, row.kv_head)]
        return (*place, row.budget_tokens, row.together, row.output_error)

    return sorted(rows, key=key)
