"""The recall report: every method, variant and budget over all layers, as rows with stable keys."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparsekv.formats.reader import Artifact
from sparsekv.runtime.budget import Budget
from sparsekv.runtime.methods import methods
from sparsekv.runtime.queries import Queries
from sparsekv.runtime.recall import Measured, measure_layer


@dataclass(frozen=True)
class RecallRow:
    """One method at one budget; layer and kv_head are None in a row that averages over all of them."""

    method: str
    variant: str
    budget: float | int
    budget_tokens: int
    selected_tokens: float
    recall: float
    attention_mass: float
    output_error: float
    kv_fraction: float
    layer: int | None
    kv_head: int | None


@dataclass(frozen=True)
class RecallReport:
    """A whole report; `rows` holds the averages first, then one row for each layer and KV head."""

    index: str
    model: str
    n_context: int
    n_middle: int
    n_queries: int
    rows: list[RecallRow]

    def averages(self) -> list[RecallRow]:
        return [row for row in self.rows if row.layer is None]

    def per_head(self) -> list[RecallRow]:
        return [row for row in self.rows if row.layer is not None]


@torch.inference_mode()
def recall_report(
    artifact: Artifact,
    names: list[str],
    budgets: list[Budget],
    queries: Queries,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> RecallReport:
    """Measure methods by name at each budget, layer by layer; memory is one layer's.

    Args:
        queries: the held-out tail's, or a person's questions; every method sees the same.
        progress: called with layers done and layers in all.
    """
    manifest = artifact.manifest
    measured = _variants(artifact, names, budgets)
    per_layer: dict[Measured, list[dict[str, torch.Tensor]]] = {one: [] for one in measured}
    for done, layer in enumerate(manifest.indexed_layers, 1):
        for one, measures in measure_layer(artifact, layer, measured, queries.blocks(layer)).items():
            per_layer[one].append(measures.means())
        progress(done, len(manifest.indexed_layers))
    rows = [_average(one, layers, manifest.split.middle) for one, layers in per_layer.items()]
    for one, layers in per_layer.items():
        rows += _per_head(one, layers, manifest.indexed_layers, manifest.split.middle)
    return RecallReport(
        index=str(artifact.folder),
        model=manifest.model.id,
        n_context=manifest.split.tokens,
        n_middle=manifest.split.middle,
        n_queries=len(queries),
        rows=rows,
    )


def _variants(artifact: Artifact, names: list[str], budgets: list[Budget]) -> list[Measured]:
    records, known = artifact.manifest.methods, methods()
    calibrations = {name: records[name].calibration if name in records else {} for name in names}
    return [
        Measured(name, variant, method, budget)
        for name in names
        for variant, method in known[name].variants(calibrations[name]).items()
        for budget in budgets
    ]


def _row(one: Measured, middle: int, means: dict[str, float], layer: int | None, kv_head: int | None) -> RecallRow:
    return RecallRow(
        method=one.name,
        variant=one.variant,
        budget=one.budget.value,
        budget_tokens=one.budget.tokens(middle),
        layer=layer,
        kv_head=kv_head,
        **means,
    )


def _average(one: Measured, layers: list[dict[str, torch.Tensor]], middle: int) -> RecallRow:
    means = {name: float(torch.stack([layer[name] for layer in layers]).mean()) for name in layers[0]}
    return _row(one, middle, means, None, None)


def _per_head(one: Measured, layers: list[dict[str, torch.Tensor]], numbers: list[int], middle: int) -> list[RecallRow]:
    return [
        _row(one, middle, {name: float(values[head]) for name, values in measures.items()}, number, head)
        for number, measures in zip(numbers, layers, strict=True)
        for head in range(len(measures["recall"]))
    ]
