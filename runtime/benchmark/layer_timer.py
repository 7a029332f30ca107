"""Time the decode step of one layer with methods at several budgets, compared with the fastest dense attention.

Dense attention is timed with implementations of torch and of other libraries.
"""

import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import MethodRecord
from sparsekv.formats.models.load import DTYPES
from sparsekv.kernels.attention.flash_attention import flash_attention_3
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.attention.plan import LayerPlan
from sparsekv.runtime.benchmark.clock import Clock, Timing
from sparsekv.runtime.benchmark.layer import (
    LayerData,
    dense_layer,
    exact_output,
    layer_step,
    place_rows,
    relative_error,
    sparse_layer,
)
from sparsekv.runtime.benchmark.sources import LayerIndexer, Source, asked_by_many, layer_of, middle_layer
from sparsekv.runtime.cache.buffers import Run
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.prepare import prepare_layer
from sparsekv.runtime.selection.checked import prepare_selector
from sparsekv.runtime.selection.interface import DENSE, Budget, Method, MethodSpec, MiddleContext
from sparsekv.runtime.selection.registry import configure

CUDA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

DenseForm = Callable[[torch.Tensor], torch.Tensor]
"""Function from queries [batch Hq, Q, D] to the attention output of the same shape, over one layer's keys and values,
without a mask."""


def dense_forms(data: LayerData) -> Iterator[tuple[str, DenseForm]]:
    """Yield the implementations of dense attention that support this data and device, by name.

    Torch's implementations are first. `gqa` passes grouped query heads to torch. `folded` passes a group's query heads
    as several queries of one KV head. Without a mask both give the same result, and keys and values are read once for
    all questions. On a GPU, `gqa` and `folded` are tried with each of torch's fused kernels. FlashAttention-3 follows,
    if a package of it can be imported. No memory is allocated other than by the attention itself.
    """
    backends: dict[str, SDPBackend | None] = {"": None}
    if data.keys.is_cuda:
        backends = dict(CUDA_BACKENDS)
    for name, backend in backends.items():
        for kind in ("gqa", "folded"):
            form = _attention(data, folded=kind == "folded")
            form = form if backend is None else _with_backend(form, backend)
            if _runs(partial(form, data.query)):
                yield f"sdpa {name} {kind}".replace("  ", " "), form
    flash_3 = _flash_attention_3(data) if data.keys.is_cuda else None
    if flash_3 is not None and _runs(partial(flash_3, data.query)):
        yield "FlashAttention-3", flash_3


def _flash_attention_3(data: LayerData) -> DenseForm | None:
    """Return FlashAttention-3's decode attention, or None if no package of it can be imported."""
    library = flash_attention_3()
    if library is None:
        return None
    keys, values = (rows.unflatten(0, (data.batch, -1)).transpose(1, 2) for rows in (data.keys, data.values))
    scale = data.facts.softmax_scale

    def attend(query: torch.Tensor) -> torch.Tensor:
        tokens = query.unflatten(0, (data.batch, -1)).transpose(1, 2)
        output: torch.Tensor = library.flash_attn_with_kvcache(tokens, keys, values, softmax_scale=scale)
        return output.transpose(1, 2).reshape(query.shape)

    return attend


def _attention(data: LayerData, *, folded: bool) -> DenseForm:
    keys, values = (rows.unflatten(0, (data.batch, -1)) for rows in (data.keys, data.values))
    scale = data.facts.softmax_scale

    def attend(query: torch.Tensor) -> torch.Tensor:
        heads = query.unflatten(0, (len(data.keys), -1)).flatten(1, 2) if folded else query
        apart = heads.unflatten(0, (data.batch, -1))
        output = scaled_dot_product_attention(apart, keys, values, scale=scale, enable_gqa=not folded)
        return output.reshape(query.shape)

    return attend


def _with_backend(form: DenseForm, backend: SDPBackend) -> DenseForm:
    def attend(query: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return form(query)

    return attend


def _runs(step: Run) -> bool:
    """Whether a library can run a step on this device, in this dtype."""
    try:
        with warnings.catch_warnings():
            # If the kernel is unavailable, torch also warns about each kernel that was not allowed.
            warnings.simplefilter("ignore")
            step()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return False
    return True


class SettingTimes:
    """Times the decode step of `questions` queries, selection included, over an index's `middle_layer`.

    Allocates the layer's keys and values in `dtype`, by default the index's dtype, and a copy of the tokens between
    sinks and tail in the layout of the timed variant.
    """

    def __init__(self, artifact: Artifact, clock: Clock, questions: int = 1, dtype: torch.dtype | None = None):
        self.artifact, self.clock, self.layer = artifact, clock, middle_layer(artifact)
        data = layer_of(artifact, self.layer, clock.device, dtype or DTYPES[artifact.manifest.dtype])
        self.data = asked_by_many(data, questions)

    def dense_step(self) -> Run:
        """Make a step with the dense attention of `generate --method dense`."""
        return layer_step(self.data, dense_layer(self.data))

    def sparse_step(self, form: MethodSpec, budget: Budget) -> tuple[Run, LayerPlan]:
        """Make a step with one variant of a method; also return the layer's plan."""
        prepared = prepare_layer(LayerRows(self.artifact, self.layer), form, self.clock.device)
        middle = place_rows(self.data, prepared.selector)
        layer = sparse_layer(self.data, middle, prepared.selector, DecodeConfig(form, budget))
        return layer_step(self.data, layer), layer.plan

    @torch.inference_mode()
    def dense(self) -> float:
        """Return the median milliseconds of a step with dense attention."""
        return self.clock.time(self.dense_step()).median

    @torch.inference_mode()
    def sparse(self, form: MethodSpec, share: float) -> float:
        """Return the median milliseconds of a step with one variant of a method.

        Args:
            share: the budget, as a fraction of the tokens between sinks and tail.
        """
        step, _ = self.sparse_step(form, Budget(share))
        return self.clock.time(step, form.method.cycle()).median


OWN = "sparsekv"


class RefusedError(SparsekvError):
    """Raised if a step cannot run, or if its output is not finite. The time of such a step would be meaningless."""


def refuse_unshared(method: Method, plan: LayerPlan, what: str) -> None:
    """Raise RefusedError if several questions cannot share a step. `what` names the step in the message."""
    if not method.can_unite():
        raise RefusedError(f"{what} cannot be shared: each question represents unselected tokens differently")
    if not plan.shareable:
        raise RefusedError(f"{what} cannot be shared: the method keeps state of one question")


@dataclass(frozen=True)
class StepTiming:
    """Times of one step.

    Attributes:
        budget: None for dense attention.
        median_ms, lower_ms, upper_ms: median and quartiles in milliseconds.
        timed: `graph`, `eager` or `wall clock`.
        speedup: median time of the fastest dense attention of other libraries, divided by this median.
        kv_fraction: number of D-sized rows of the index and of the middle (the tokens between sinks and tail) that a
            step reads, divided by the number of the middle's key and value rows.
        bytes: bytes that a step reads.
        bandwidth: `bytes` per second of the median.
        floor_ms: milliseconds in which a memory copy reads and writes `bytes` bytes in all.
        floor_share: `floor_ms` divided by the median.
        output_error: error of the output relative to dense attention in float32.
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
        """Name of the method, with its variant."""
        return f"{self.method} {self.variant}".strip()


class Bench:
    """Times the steps of one layer. `copy` is the bandwidth of a memory copy in bytes per second."""

    @torch.inference_mode()
    def __init__(self, data: LayerData, clock: Clock, copy: float):
        self.data, self.clock, self.copy = data, clock, copy
        self.exact = exact_output(data)
        self.dense_ms = float("nan")
        self.batch = data.batch * data.questions

    @torch.inference_mode()
    def dense(self) -> list[StepTiming]:
        """Time the dense attention of other libraries and this project's dense attention.

        The results of other libraries come first, sorted by time. The fastest of them is the baseline of all speed-ups.
        In a model, this project's dense attention decodes the layers that have a sliding window.
        """
        middle, keys = self.data.split.middle, self.data.keys
        read = 2.0 * keys.shape[0] * keys.shape[1] * self.data.row_bytes()
        timings = {
            name: self._timed(f"{DENSE} {name}", partial(form, self.data.query))
            for name, form in dense_forms(self.data)
        }
        self.dense_ms = min(timing.median for timing in timings.values())
        order = sorted(timings, key=lambda name: timings[name].median)
        own = layer_step(self.data, dense_layer(self.data))
        timings[OWN] = self._timed(f"{DENSE} {OWN}", own)
        less = {OWN: self.data.saved(2.0 * keys.shape[1])}
        rows = ((name, timings[name], read - less.get(name, 0.0)) for name in (*order, OWN))
        return [self._row(DENSE, name, None, middle, timing, bytes_read, 1.0) for name, timing, bytes_read in rows]

    @torch.inference_mode()
    def sparse(self, form: MethodSpec, context: MiddleContext, budgets: list[Budget]) -> Iterator[StepTiming]:
        """Time a variant of a method over `context` at each budget; `dense` must be called first.

        Allocates a copy of the keys and values between sinks and tail in the method's layout.

        Raises:
            RefusedError: the output is not finite, or several questions cannot share a step.
        """
        data = self.data
        selector = prepare_selector(form.method, context)
        rows = place_rows(data, selector)
        cycle = form.method.cycle()
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
            # `read.total` counts rows of keys, values and index in one number, at full precision. What int8 saves can
            # be computed only for one question: the union of several questions' selections may exceed the budget.
            of_centroids = 0 if selector.kernels is None else selector.kernels.rows_in_8_bits
            in_8_bits = 2.0 * budget.tokens(data.split.middle) + of_centroids if data.questions == 1 else 0.0
            read = (chosen / cycle + exact_rows) * data.row_bytes() - data.saved(in_8_bits)
            layer.rewind()
            yield self._row(form.name, form.variant, budget, data.split.middle, timing, read, chosen / dense)

    def named(self, name: str) -> str:
        """Return the name of a measurement with context length and batch."""
        return f"{name} over {self.data.split.tokens:,} tokens, batch {self.batch},"

    def _timed(self, name: str, step: Run, cycle: int = 1) -> Timing:
        timing = self.clock.time(step, cycle)
        self._check(name, timing.output)
        return timing

    def _check(self, name: str, output: torch.Tensor) -> None:
        if not bool(output.isfinite().all()):
            raise RefusedError(f"{self.named(name)} gave an output that is not finite")

    def _row(
        self, name: str, variant: str, budget: Budget | None, middle: int, timing: Timing, read: float, fraction: float
    ) -> StepTiming:
        floor = 1000 * read / self.copy
        return StepTiming(
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


Forms = Callable[[type[Method], MethodRecord | None], dict[str, Method]]
"""Function that returns the variants of a method to time, by name."""


@dataclass
class Timed:
    """Results of a comparison: timed steps (`rows`), and the reason for each missing step (`refused`).

    `copy_bandwidth` is the bandwidth of a memory copy in bytes per second.
    """

    copy_bandwidth: float
    rows: list[StepTiming] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Timer:
    """Compares the times of methods at several budgets. `tell` is called with a line of text for each result."""

    source: Source
    methods: Mapping[str, type[Method]]
    built: Mapping[str, LayerIndexer]
    forms: Forms
    budgets: list[Budget]
    tell: Callable[[str], None]

    def run(self, clock: Clock) -> Timed:
        """Time dense attention and all methods on all layers.

        If a method cannot run or does not fit the device's memory, `refused` of the result has the reason. Needs the
        memory of one layer, of a copy of the layer in one method's layout, and of that method's index.

        Raises:
            SparsekvError: a layer, or dense attention over it, does not fit the device's memory.
        """
        timed = Timed(clock.bandwidth())
        try:
            for data in self.source.layers(self.built):
                self._time_layer(timed, Bench(data, clock, timed.copy_bandwidth))
                del data  # free the layer before the next layer is generated
        except torch.OutOfMemoryError:
            raise SparsekvError(
                f"keys and values do not fit the memory of {clock.device}; {self.source.less_memory}"
            ) from None
        return timed

    def _time_layer(self, timed: Timed, bench: Bench) -> None:
        self._add(timed, bench.dense())
        for name in self.methods:
            try:
                indexed = self.source.index(bench.data, name, self.built.get(name))
                for variant, method in self.forms(self.methods[name], indexed.record).items():
                    self._add(timed, bench.sparse(MethodSpec(name, variant, method), indexed.context, self.budgets))
            except RefusedError as error:
                timed.refused.append(str(error))
            except torch.OutOfMemoryError:
                timed.refused.append(f"{bench.named(name)} does not fit the memory of {bench.data.keys.device}")

    def _add(self, timed: Timed, rows: Iterator[StepTiming] | list[StepTiming]) -> None:
        for row in rows:
            timed.rows.append(row)
            budget = "" if row.budget is None else f" at {Budget(row.budget)}"
            self.tell(
                f"{row.context:,} tokens, batch {row.batch}: {row.name}{budget}: {row.median_ms:.4f} ms, {row.timed}"
            )


def check_runs(runs: int) -> int:
    """Return the number of runs. Raises UsageError for fewer than 2, because quartiles need two runs."""
    if runs < 2:
        raise UsageError(f"--runs {runs}: give at least 2, for a spread")
    return runs


def configured(parameters: Mapping[str, Any], method: type[Method], record: MethodRecord | None) -> dict[str, Method]:
    """Create the only variant of a method to time: its parameters are those that the user set, and its name lists them.

    Raises the errors of `configure`.
    """
    names = [one.name for one in fields(method) if parameters.get(one.name) is not None]
    variant = ", ".join(f"{name} {parameters[name]}" for name in names)
    return {variant: configure(method, parameters)}


def machine(where: torch.device) -> str:
    """Return the name of the GPU or CPU that runs the steps."""
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
