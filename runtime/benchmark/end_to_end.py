"""Times the decode steps of a whole model, dense and sparse, over synthetic contexts.

The model's layers share a few layers' keys and values in turn, because those of all layers would not fit into device
memory. Reuse does not make the caches warm, because the weights are read in between. torch's dense attention covers the
context alone: it does not read generated rows, which is in its favour.
"""

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.benchmark.clock import clock_for
from sparsekv.runtime.benchmark.dense import dense_forms
from sparsekv.runtime.benchmark.layer import LayerData, dense_layer, lay_out, sparse_layer
from sparsekv.runtime.benchmark.model_steps import BatchSteps, DenseFormLayer, ModelSteps, QuestionSteps
from sparsekv.runtime.benchmark.rows import OWN, RefusedError, refuse_unshared
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.kv_store import MiddleRows
from sparsekv.runtime.cache.stored_layer import StoredLayer
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.context import LayerPosition, MiddleContext
from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.selection.interface import Method
from sparsekv.runtime.selection.registry import DENSE

NOTHING = "no attention"
WARM_UPS, FORM_RUNS = 3, 10


@dataclass(frozen=True)
class ModelRow:
    """One way to decode: milliseconds per step (median and quartiles) and tokens per second of all sequences together.

    `timed` is graph, eager or wall clock; `speedup` is the ratio of tokens per second to torch's dense attention;
    `kv_fraction` is of the middle's keys and values, index included. The row without attention times everything else.
    """

    method: str
    variant: str
    context: int
    batch: int
    budget: float | int | None
    median_ms: float
    lower_ms: float
    upper_ms: float
    runs: int
    timed: str
    tokens_per_second: float
    speedup: float
    kv_fraction: float


class ModelBench:
    """Measures a model over a few layers' data of one context and batch; `tell` is called with a line per row."""

    def __init__(self, model: PreTrainedModel, data: list[LayerData], runs: int, tell: Callable[[str], None]):
        self.model, self.data, self.runs, self.tell = model, data, runs, tell
        self.layers = int(model.config.num_hidden_layers)
        self.dense_rate, self.batch = float("nan"), data[0].batch * data[0].questions

    @torch.inference_mode()
    def dense(self) -> Iterator[ModelRow]:
        """Three rows: the fastest form of torch's dense attention, which becomes the baseline of the others; our dense
        attention; no attention."""
        name = self._fastest_form()
        forms = [dict(dense_forms(data))[name] for data in self.data]
        torchs = self._time(self._each(lambda data, turn: DenseFormLayer(data, forms[turn])))
        self.dense_rate = torchs.rate
        yield self._row(DENSE, name, None, torchs, 1.0)
        own = self._each(lambda data, turn: dense_layer(data))
        yield self._row(DENSE, OWN, None, self._time(own), 1.0)
        none = self._each(lambda data, turn: DenseFormLayer(data, lambda query: query.clone()))
        yield self._row(NOTHING, "", None, self._time(none), 0.0)

    @torch.inference_mode()
    def sparse(self, form: Form, contexts: list[MiddleContext], budgets: list[Budget]) -> Iterator[ModelRow]:
        """A form at each budget, with one context for each distinct layer; call `dense` first.

        Allocates a copy of the middles in the method's layout.

        Raises:
            RefusedError: its logits are not finite, or several questions cannot share a step.
        """
        laid_out: dict[int, MiddleRows] = {}
        for budget in budgets:
            layers = self._sparse_layers(DecodeConfig(form, budget), form.method, contexts, laid_out)
            timed = self._time(layers, int(getattr(form.method, "step", 1)))
            yield self._row(form.name, form.variant, budget, timed, IndexCache(layers).kv_fraction())

    def _sparse_layers(
        self, config: DecodeConfig, method: Method, contexts: list[MiddleContext], laid_out: dict[int, MiddleRows]
    ) -> list[StoredLayer]:
        layers: list[StoredLayer] = []
        shared: dict[str, object] = {}
        for number in range(self.layers):
            turn = number % len(self.data)
            context = replace(contexts[turn], position=LayerPosition(number, self.layers, shared))
            selector = method.prepare(context)
            if turn not in laid_out:
                laid_out[turn] = lay_out(self.data[turn], selector)
            layer = sparse_layer(self.data[turn], laid_out[turn], selector, config)
            if self.data[turn].questions > 1:
                refuse_unshared(method, layer.plan, f"a model's step with {type(method).__name__}")
            layers.append(layer)
        return layers

    def _each(self, make: Callable[[LayerData, int], StoredLayer]) -> list[StoredLayer]:
        """A cache layer for each of the model's layers, over the data in turn."""
        turns = [number % len(self.data) for number in range(self.layers)]
        return [make(self.data[turn], turn) for turn in turns]

    def _fastest_form(self) -> str:
        clock = clock_for(self.model.device, FORM_RUNS, cold=True)
        taken = {
            name: clock.time(lambda form=form: form(self.data[0].query)).median  # type: ignore[misc]
            for name, form in dense_forms(self.data[0])
        }
        return min(taken, key=lambda name: taken[name])

    def _time(self, layers: list[StoredLayer], cycle: int = 1) -> "_Timed":
        """Time greedy decode steps, so many `cycle` at a time: a method may choose in one of them alone."""
        device, steps = self.model.device, self._steps(layers, WARM_UPS + self.runs * cycle)
        with steps.routed():
            tokens = torch.arange(self.batch, device=device)[:, None]
            for _ in range(WARM_UPS):
                tokens = steps(tokens).argmax(-1, keepdim=True)
            stopwatch = _CudaStopwatch() if device.type == "cuda" else _Stopwatch()
            for _ in range(self.runs):
                for _ in range(cycle):
                    logits = steps(tokens)
                    tokens = logits.argmax(-1, keepdim=True)
                stopwatch.lap()
            taken, finite = [lap / cycle for lap in stopwatch.milliseconds()], bool(logits.isfinite().all())
        how = "wall clock" if device.type == "cpu" else "graph" if steps.captured() else "eager"
        return _Timed(taken, how, 1000 * self.batch * len(taken) / sum(taken), finite)

    def _steps(self, layers: list[StoredLayer], tokens: int) -> ModelSteps:
        data = self.data[0]
        if data.questions > 1:
            return QuestionSteps(self.model, layers, data.split.tokens, data.questions)
        return BatchSteps(self.model, layers, data.batch, tokens)

    def _row(self, name: str, variant: str, budget: Budget | None, timed: "_Timed", kv_fraction: float) -> ModelRow:
        split, batch = self.data[0].split, self.batch
        if not timed.finite:
            raise RefusedError(f"{name} {variant} over {split.tokens:,} tokens, batch {batch}, gave what is no number")
        lower, median, upper = statistics.quantiles(timed.milliseconds, n=4, method="inclusive")
        self.tell(f"{name} {variant}: {median:.2f} ms a step, {timed.rate:,.1f} tokens a second, {timed.how}")
        return ModelRow(
            method=name,
            variant=variant,
            context=split.tokens,
            batch=batch,
            budget=None if budget is None else budget.value,
            median_ms=median,
            lower_ms=lower,
            upper_ms=upper,
            runs=self.runs,
            timed=timed.how,
            tokens_per_second=timed.rate,
            speedup=timed.rate / self.dense_rate,
            kv_fraction=kv_fraction,
        )


@dataclass(frozen=True)
class _Timed:
    """Milliseconds per step, how they were timed, tokens per second, whether the last logits are finite."""

    milliseconds: list[float]
    how: str
    rate: float
    finite: bool


class _Laps(ABC):
    @abstractmethod
    def lap(self) -> None:
        """Mark the end of a lap; the first lap begins when the stopwatch is created."""

    @abstractmethod
    def milliseconds(self) -> list[float]:
        """Milliseconds of each lap; call it after the last."""


class _Stopwatch(_Laps):
    """By the host's clock."""

    def __init__(self) -> None:
        self.marks = [time.perf_counter()]

    def lap(self) -> None:
        self.marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        return [1000 * (stop - start) for start, stop in pairwise(self.marks)]


class _CudaStopwatch(_Laps):
    """By CUDA events between the steps; time that the GPU waits for the host counts, as where questions share one."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self.marks: list[torch.cuda.Event] = []
        self.lap()

    def lap(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def milliseconds(self) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in pairwise(self.marks)]
