"""Timed decode steps of `bench` and `bench-model` as a table, JSON or CSV.

Also indexers that build the methods' tensors over synthetic keys and values.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from rich.table import Table

from sparsekv.cli.benchmarking.options import ITERATIONS
from sparsekv.cli.common.console import say, say_csv
from sparsekv.cli.common.options import FormatOptions, TableOptions
from sparsekv.cli.common.tables import differing, grouped, say_markup, show_fitting, titled_table
from sparsekv.formats.index.schema import MethodRecord
from sparsekv.indexing.indexers.interface import BuiltLayer, Indexer, LayerInput, indexers
from sparsekv.runtime.benchmark.end_to_end import ModelRow
from sparsekv.runtime.benchmark.layer import LayerData
from sparsekv.runtime.benchmark.layer_timer import StepTiming
from sparsekv.runtime.benchmark.sources import LayerIndexer
from sparsekv.runtime.selection.interface import Budget
from sparsekv.runtime.selection.registry import configure


@dataclass(frozen=True)
class MixtureIndexer(LayerIndexer):
    """Runs an indexer on a layer of a synthetic mixture, as if it were a layer of a document."""

    parameters: Indexer

    def queries_wanted(self) -> int:
        return self.parameters.queries_wanted()

    def build(self, data: LayerData) -> dict[str, torch.Tensor]:
        layer = LayerInput(
            keys=data.keys[:, data.middle],
            values=data.values[:, data.middle],
            facts=data.facts,
            split=data.split,
            queries=data.sampled,
            positions=data.positions,
            sink_keys=data.keys[:, : data.split.sinks],
        )
        return self.parameters.build_layer(layer)

    def record(self, tensors: dict[str, torch.Tensor], data: LayerData) -> MethodRecord:
        built = BuiltLayer(tensors, data.tail, data.facts)
        return MethodRecord(
            revision=self.parameters.revision,
            parameters=asdict(self.parameters),
            seed=self.parameters.seed,
            calibration=self.parameters.calibrate(lambda: iter([built])),
            built_from={},
        )


def mixture_indexers(
    names: Sequence[str], parameters: Mapping[str, Any], seed: int, head_dim: int
) -> dict[str, LayerIndexer]:
    """Return the indexers of the named methods that have an index, with the user's parameters.

    Raises:
        UsageError: an indexer does not support these parameters, or heads of `head_dim` channels.
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    wanted = {name: known for name, known in indexers().items() if name in names}
    configured = {
        name: configure(one, {"iterations": ITERATIONS, "seed": seed} | given) for name, one in wanted.items()
    }
    for one in configured.values():
        one.check_channels(head_dim)
    return {name: MixtureIndexer(one) for name, one in configured.items()}


def print_rows(rows: Sequence[StepTiming], about: dict[str, Any], form: FormatOptions) -> None:
    """Print the timed steps to stdout as JSON, as CSV, as one table in a markup language, or as tables by context and
    batch."""
    if form.as_json:
        say(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))
    elif form.as_csv:
        say_csv([field.name for field in fields(StepTiming)], (asdict(row) for row in rows))
    elif form.markup:
        say_markup(_table(rows, about), form.markup)
    else:
        for group in grouped(rows, GROUPING):
            lesser = ("GB/s", "MB", "of floor", "timed", "error", "kv fraction")
            show_fitting(_table(group, about), lesser, width=140)


GROUPING = ("context", "batch")
"""Fields of a row by which the tables for a terminal are divided."""


def _table(rows: Sequence[StepTiming], about: dict[str, Any]) -> Table:
    """Return a table of timed steps. A field of GROUPING has a column if its values differ between the steps."""
    first, divided = rows[0], differing(rows, GROUPING)
    batch = f"{first.batch} questions over one document" if about["shared"] else f"batch {first.batch}"
    table = titled_table(
        f"{first.context:,} tokens, {batch}, {about['heads']} heads on {about['kv_heads']}, "
        f"D = {about['head_dim']}, {about['dtype']}, {about['machine']}, caches {about['caches']}; "
        f"a copy reaches {about['copy_bandwidth'] / 1e9:,.1f} GB/s",
        ["method"],
        [
            *divided,
            *("budget", "ms [quartiles]", "speed-up", "kv fraction", "MB", "GB/s", "of floor", "error", "timed"),
        ],
    )
    for group in grouped(rows, GROUPING):
        for row in group:
            table.add_row(
                row.name,
                *(f"{getattr(row, name):,}" for name in divided),
                "" if row.budget is None else str(Budget(row.budget)),
                f"{row.median_ms:.4f} [{row.lower_ms:.4f}, {row.upper_ms:.4f}]",
                f"{row.speedup:.2f}",
                f"{row.kv_fraction:.3f}",
                f"{row.bytes / 1e6:,.1f}",
                f"{row.bandwidth / 1e9:,.1f}",
                f"{row.floor_share:.2f}",
                f"{row.output_error:.4f}",
                row.timed,
            )
        table.add_section()
    return table


def print_model_rows(rows: Sequence[ModelRow], about: dict[str, Any], form: TableOptions) -> None:
    """Print the timed steps of a whole model to stdout: JSON, or a table for a terminal or in a markup language."""
    if form.as_json:
        return say(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))
    compiled = ", compiled" if about["compiled"] else ""
    shared = "a batch over one document, " if about["shared"] else ""
    rounded = any(row.weights is not None for row in rows)
    table = titled_table(
        f"{about['config']}, random weights, {about['layers']} layers that take turns with the keys and values "
        f"of {about['distinct_layers']}, {about['dtype']}{compiled}, {shared}{about['machine']}",
        ["method", *(["weights"] if rounded else [])],
        ["context", "batch", "budget", "ms a step [quartiles]", "tokens/s", "speed-up", "kv fraction", "timed"],
    )
    for row in rows:
        table.add_row(
            f"{row.method} {row.variant}".strip(),
            *([row.weights or about["dtype"]] if rounded else []),
            f"{row.context:,}",
            str(row.batch),
            "" if row.budget is None else str(Budget(row.budget)),
            f"{row.median_ms:.2f} [{row.lower_ms:.2f}, {row.upper_ms:.2f}]",
            f"{row.tokens_per_second:,.1f}",
            f"{row.speedup:.2f}",
            f"{row.kv_fraction:.3f}",
            row.timed,
        )
    if form.markup:
        return say_markup(table, form.markup)
    show_fitting(table, ("timed", "kv fraction", "batch", "tokens/s"), width=140)
