"""Benchmark rows of one layer: forms of dense attention, then methods at budgets, relative to the fastest dense form.

Bytes are those that a step must read. Dense attention reads all keys and values; a method reads sinks, tail, the chosen
rows and its index, counted as for the KV fraction of a report. The floor is the time that these bytes take at the
bandwidth of a copy.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsekv.formats.errors import SparsekvError
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.attention.plan import LayerPlan
from sparsekv.runtime.benchmark.clock import Clock, Timing
from sparsekv.runtime.benchmark.dense import dense_steps
from sparsekv.runtime.benchmark.layer import (
    LayerData,
    dense_layer,
    exact_output,
    lay_out,
    layer_step,
    relative_error,
    sparse_layer,
)
from sparsekv.runtime.cache.graphs import Step
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.capabilities import CentroidsIn8Bits
from sparsekv.runtime.selection.context import MiddleContext
from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.selection.interface import Method
from sparsekv.runtime.selection.registry import DENSE
from sparsekv.runtime.selection.union import can_unite

OWN = "sparsekv"


class RefusedError(SparsekvError):
    """A step has no output, or none that is finite, so that a time would mean nothing."""


def refuse_unshared(method: Method, plan: LayerPlan, what: str) -> None:
    """Raise RefusedError where questions cannot share a step of `what`."""
    if not can_unite(method, plan.selector):
        raise RefusedError(f"{what} leaves what differs from question to question")
    if not plan.shareable:
        raise RefusedError(f"{what} keeps something of one question, which others cannot share")


@dataclass(frozen=True)
class Row:
    """One step's time: median and quartiles in milliseconds; `timed` is graph, eager or wall clock.

    `output_error` is relative to dense attention in float32; `kv_fraction` is of the middle's keys and values, index
    included; `bandwidth` is in bytes per second; `floor_share` is the floor over the median; `speedup` is the fastest
    dense form's median over this one's. Dense attention has no budget.
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
    """Measures one layer; `copy` is the copy bandwidth for the floors, in bytes per second."""

    @torch.inference_mode()
    def __init__(self, data: LayerData, clock: Clock, copy: float):
        self.data, self.clock, self.copy = data, clock, copy
        self.exact = exact_output(data)
        self.dense_ms = float("nan")
        self.batch = data.batch * data.questions

    @torch.inference_mode()
    def dense(self) -> list[Row]:
        """Rows of all of torch's forms of dense attention, fastest first, which becomes the baseline of the others;
        then our own dense attention, which decodes the layers that are not indexed."""
        middle, keys = self.data.split.middle, self.data.keys
        read = 2.0 * keys.shape[0] * keys.shape[1] * self.data.row_bytes()
        timings = {name: self._timed(f"{DENSE} {name}", step) for name, step in dense_steps(self.data)}
        self.dense_ms = min(timing.median for timing in timings.values())
        order = sorted(timings, key=lambda name: timings[name].median)
        own = layer_step(self.data, dense_layer(self.data))
        timings[OWN] = self._timed(f"{DENSE} {OWN}", own)
        less = {OWN: self.data.saved(2.0 * keys.shape[1])}
        rows = ((name, timings[name], read - less.get(name, 0.0)) for name in (*order, OWN))
        return [self._row(DENSE, name, None, middle, timing, bytes_read, 1.0) for name, timing, bytes_read in rows]

    @torch.inference_mode()
    def sparse(self, form: Form, context: MiddleContext, budgets: list[Budget]) -> Iterator[Row]:
        """A form at each budget, which chooses from `context`; call `dense` first.

        Allocates a copy of the middle in the method's layout.

        Raises:
            RefusedError: its output is not finite, or several questions cannot share a step.
        """
        data = self.data
        selector = form.method.prepare(context)
        rows = lay_out(data, selector)
        # A method that searches only every `step` steps is timed over that many.
        cycle = int(getattr(form.method, "step", 1))
        exact_rows = 2.0 * data.keys.shape[0] * (data.split.tokens - data.split.middle)
        for budget in budgets:
            layer = sparse_layer(data, rows, selector, DecodeConfig(form, budget))
            step, named = layer_step(data, layer), form.title
            if data.questions > 1:
                refuse_unshared(form.method, layer.plan, self.named(named))
            for _ in range(cycle):
                self._check(f"{named} at {budget}", step())
            chosen, dense = layer.plan.read.total(), layer.plan.read.dense
            timing = self._timed(f"{named} at {budget}", step, cycle)
            # What several questions choose together is not their budget, and is not told apart from an index's rows.
            of_centroids = selector.rows_in_8_bits if isinstance(selector, CentroidsIn8Bits) else 0
            in_8_bits = 2.0 * budget.tokens(data.split.middle) + of_centroids if data.questions == 1 else 0.0
            read = (chosen / cycle + exact_rows) * data.row_bytes() - data.saved(in_8_bits)
            layer.rewind()
            yield self._row(form.name, form.variant, budget, data.split.middle, timing, read, chosen / dense)

    def named(self, what: str) -> str:
        """The name of a measurement, with context length and batch."""
        return f"{what} over {self.data.split.tokens:,} tokens, batch {self.batch},"

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
            batch=self.batch,
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
