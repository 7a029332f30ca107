"""Measured rows: dense attention's forms, then methods at budgets, each against the fastest dense form of the same run.

Bytes are those that a step must read: of dense attention all keys and values; of a method sinks, tail, the chosen rows
and what it reads to choose them, the account that the KV fraction of a report is of. The floor is the time that so many
bytes take at the bandwidth of a copy.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsekv.formats.errors import SparsekvError
from sparsekv.runtime.benchmark.clock import Clock, Timing
from sparsekv.runtime.benchmark.dense import dense_steps
from sparsekv.runtime.benchmark.layer import (
    LayerData,
    exact_output,
    lay_out,
    layer_step,
    relative_error,
    sparse_layer,
)
from sparsekv.runtime.cache.graphs import Step
from sparsekv.runtime.cache.stored_layer import DenseLayer
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.context import MiddleContext
from sparsekv.runtime.selection.form import Form

DENSE, OWN = "dense", "sparsekv"


class RefusedError(SparsekvError):
    """A step gave something that is no number, so that its time would mean nothing."""


@dataclass(frozen=True)
class Row:
    """One step's time: median and quartiles in milliseconds; `timed` is graph, eager or wall clock.

    `output_error` is against dense attention in float32; `kv_fraction` of the middle's keys and values, the index
    included; `bandwidth` in bytes a second; `floor_share` the floor over the median; `speedup` the fastest dense form's
    median over this one's. Dense attention has no budget.
    """

    method: str
    variant: str
    context: int
    batch: int
    budget: float | int | None
    budget_tokens: int
    median_ms: float
    lower_ms: float
    upper_ms: float
    runs: int
    timed: str
    speedup: float
    kv_fraction: float
    bytes: float
    bandwidth: float
    floor_ms: float
    floor_share: float
    output_error: float

    @property
    def name(self) -> str:
        """The method and its variant."""
        return f"{self.method} {self.variant}".strip()


class Bench:
    """One layer's measurements; `copy` is the bandwidth that floors are of, in bytes a second."""

    @torch.inference_mode()
    def __init__(self, data: LayerData, clock: Clock, copy: float):
        self.data, self.clock, self.copy = data, clock, copy
        self.exact = exact_output(data)
        self.dense_ms = float("nan")

    @torch.inference_mode()
    def dense(self) -> list[Row]:
        """All of torch's forms of dense attention, the fastest first, which from now on is what others are compared
        with; then the one that decodes here where nothing is indexed."""
        middle, keys = self.data.split.middle, self.data.keys
        read = 2.0 * keys.shape[0] * keys.shape[1] * self.data.row_bytes()
        timings = {name: self._timed(f"{DENSE} {name}", step) for name, step in dense_steps(self.data)}
        self.dense_ms = min(timing.median for timing in timings.values())
        order = sorted(timings, key=lambda name: timings[name].median)
        own = layer_step(self.data, DenseLayer(self.data.keys, self.data.values))
        timings[OWN] = self._timed(f"{DENSE} {OWN}", own)
        return [self._row(DENSE, name, None, middle, timings[name], read, 1.0) for name in (*order, OWN)]

    @torch.inference_mode()
    def sparse(self, form: Form, context: MiddleContext, budgets: list[Budget]) -> Iterator[Row]:
        """A form at each budget, choosing from `context`; after `dense`.

        Allocates the middle once more, in the method's layout.

        Raises:
            RefusedError: its output is not finite.
        """
        data = self.data
        selector = form.method.prepare(context)
        rows = lay_out(data, selector)
        # One that searches every so many steps is timed over that many.
        cycle = int(getattr(form.method, "step", 1))
        exact_rows = 2.0 * data.keys.shape[0] * (data.split.tokens - data.split.middle)
        for budget in budgets:
            layer = sparse_layer(data, rows, selector, budget)
            step, named = layer_step(data, layer), form.title
            for _ in range(cycle):
                self._check(f"{named} at {budget}", step())
            chosen, dense = layer.plan.read.total(), layer.plan.read.dense
            timing = self._timed(f"{named} at {budget}", step, cycle)
            read = (chosen / cycle + exact_rows) * data.row_bytes()
            layer.rewind()
            yield self._row(form.name, form.variant, budget, data.split.middle, timing, read, chosen / dense)

    def named(self, what: str) -> str:
        """What is measured, with the layer that it is measured on."""
        return f"{what} over {self.data.split.tokens:,} tokens, batch {self.data.batch},"

    def _timed(self, name: str, step: Step, cycle: int = 1) -> Timing:
        timing = self.clock.time(step, cycle)
        self._check(name, timing.output)
        return timing

    def _check(self, name: str, output: torch.Tensor) -> None:
        if not bool(output.isfinite().all()):
            raise RefusedError(f"{self.named(name)} gave an output that is not finite")

    def _row(
        self, name: str, variant: str, budget: Budget | None, middle: int, timing: Timing, read: float, fraction: float
    ) -> Row:
        floor = 1000 * read / self.copy
        return Row(
            method=name,
            variant=variant,
            context=self.data.split.tokens,
            batch=self.data.batch,
            budget=None if budget is None else budget.value,
            budget_tokens=middle if budget is None else budget.tokens(middle),
            median_ms=timing.median,
            lower_ms=timing.lower,
            upper_ms=timing.upper,
            runs=self.clock.runs,
            timed=timing.how,
            speedup=self.dense_ms / timing.median,
            kv_fraction=fraction,
            bytes=read,
            bandwidth=1000 * read / timing.median,
            floor_ms=floor,
            floor_share=floor / timing.median,
            output_error=relative_error(timing.output, self.exact),
        )
