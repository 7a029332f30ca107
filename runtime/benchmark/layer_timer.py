"""Timing methods on the layers of a source, one after another."""

import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.schema import MethodRecord
from sparsekv.runtime.benchmark.clock import Clock
from sparsekv.runtime.benchmark.indexed_layers import LayerIndexer
from sparsekv.runtime.benchmark.rows import Bench, RefusedError, Row
from sparsekv.runtime.benchmark.sources import Source
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.configure import configure
from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.selection.interface import Method

Forms = Callable[[type[Method], MethodRecord | None], dict[str, Method]]
"""The forms of a method to time, by variant."""


@dataclass
class Timed:
    """Rows, and why others are missing; `copy_bandwidth` is in bytes a second."""

    copy_bandwidth: float
    rows: list[Row] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Timer:
    """What to time: methods, what builds their indices, their forms, and budgets; `tell` is told of each row."""

    source: Source
    methods: Mapping[str, type[Method]]
    built: Mapping[str, LayerIndexer]
    forms: Forms
    budgets: list[Budget]
    tell: Callable[[str], None]

    def run(self, clock: Clock) -> Timed:
        """Time everything. Memory is one layer's, its copy in one method's layout, and that method's index.

        Raises:
            SparsekvError: a layer does not fit the device's memory.
        """
        timed = Timed(clock.bandwidth())
        try:
            for data in self.source.layers(self.built):
                self._time_layer(timed, Bench(data, clock, timed.copy_bandwidth))
                del data  # or else the next one would be made beside it
        except torch.OutOfMemoryError:
            raise SparsekvError(
                f"keys and values do not fit the memory of {clock.device}; choose a smaller --context or --batch"
            ) from None
        return timed

    def _time_layer(self, timed: Timed, bench: Bench) -> None:
        self._add(timed, bench.dense())
        for name in self.methods:
            try:
                indexed = self.source.index(bench.data, name, self.built.get(name))
                for variant, method in self.forms(self.methods[name], indexed.record).items():
                    self._add(timed, bench.sparse(Form(name, variant, method), indexed.context, self.budgets))
            except RefusedError as error:
                timed.refused.append(str(error))
            except torch.OutOfMemoryError:
                timed.refused.append(f"{bench.named(name)} does not fit the memory of {bench.data.keys.device}")

    def _add(self, timed: Timed, rows: Iterator[Row] | list[Row]) -> None:
        for row in rows:
            timed.rows.append(row)
            budget = "" if row.budget is None else f" at {Budget(row.budget)}"
            self.tell(
                f"{row.context:,} tokens, batch {row.batch}: {row.name}{budget}: {row.median_ms:.4f} ms, {row.timed}"
            )


def check_runs(runs: int) -> int:
    """The same; UsageError for so few that there is no spread."""
    if runs < 2:
        raise UsageError(f"--runs {runs}: give at least 2, for a spread")
    return runs


def configured(parameters: Mapping[str, Any], method: type[Method], record: MethodRecord | None) -> dict[str, Method]:
    """A method as a person set it; what was set is its variant."""
    names = [one.name for one in fields(method) if parameters.get(one.name) is not None]
    variant = ", ".join(f"{name} {parameters[name]}" for name in names)
    return {variant: configure(method, parameters)}


def machine(where: torch.device) -> str:
    """What the steps run on, for a person."""
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
