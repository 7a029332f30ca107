"""Time the decode steps of a whole model with dense and with sparse attention over synthetic contexts."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sparsekv.formats.errors import UsageError, choose_one
from sparsekv.formats.index.schema import Weights
from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.attention.sparse_layer import packed_layer
from sparsekv.runtime.benchmark.clock import Timing, clock_for
from sparsekv.runtime.benchmark.layer import LayerData, dense_layer, place_rows, sparse_layer
from sparsekv.runtime.benchmark.layer_timer import OWN, DenseForm, RefusedError, dense_forms, refuse_unshared
from sparsekv.runtime.benchmark.settings import CONFIGS
from sparsekv.runtime.cache.index_cache import Fed, IndexCache, SequenceCache
from sparsekv.runtime.cache.kv_store import MiddleRows
from sparsekv.runtime.cache.packed_cache import PackedCache, PackedLayer, PackedStep, Piece
from sparsekv.runtime.cache.stored_layer import StoredLayer
from sparsekv.runtime.decoding.step import DecodeStep
from sparsekv.runtime.decoding.threads import all_cores
from sparsekv.runtime.selection.checked import prepare_selector
from sparsekv.runtime.selection.interface import DENSE, Budget, LayerPosition, Method, MethodSpec, MiddleContext


class DenseFormLayer(StoredLayer):
    """Cache layer that attends to the context by one implementation of `dense_forms`.

    The layer stores the keys and values of new tokens, but does not attend to them.
    """

    def __init__(self, data: LayerData, form: DenseForm):
        super().__init__(data.split.tokens, data.keys[:, :0], data.values[:, :0])
        self.form = form

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self.form(call.query)


class PackedForm(PackedLayer):
    """A `DenseFormLayer` for a batch of questions over one context."""

    def __init__(self, layer: DenseFormLayer, slots: int):
        super().__init__(layer, slots)
        self.form = layer.form

    def answer(self, call: AttentionCall, step: PackedStep) -> torch.Tensor:
        return self.form(call.query)

    def ask(self, call: AttentionCall, piece: Piece, number: int) -> torch.Tensor:
        raise NotImplementedError  # the benchmark prefills no questions


class TimedSteps:
    """Runs decode steps of all sequences of a cache, as `generate` does.

    An instance is called for each step, within the context manager `routed`.

    Args:
        context: number of tokens of the stored context.
        steps: number of steps that will be called.
    """

    def __init__(self, model: PreTrainedModel, cache: SequenceCache, context: int, steps: int):
        self.model, self.cache, self.steps, self.fed = model, cache, steps, 0
        self.step = DecodeStep(model, cache, context)

    @contextmanager
    def routed(self) -> Iterator[None]:
        with route_attention(self.model, self.cache.attend), all_cores(self.model):
            try:
                yield
            finally:
                self.cache.release()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run one step with tokens [B, 1]; return the next tokens' logits [B, V]. The next call may overwrite them."""
        fed = [Fed(slot, self.fed, [], asks=False) for slot in range(self.cache.slots)]
        self.fed += 1
        return self.step(fed, tokens[:, 0], self.steps)

    def captured(self) -> bool:
        """Whether the steps are replayed as CUDA graphs."""
        return bool(self.cache.graphs)


def packed_cache(layers: list[StoredLayer], questions: int) -> PackedCache:
    """Make a cache for several questions over one context, as `generate --batch-file` uses."""
    packed = [
        PackedForm(layer, questions) if isinstance(layer, DenseFormLayer) else packed_layer(layer, questions)
        for layer in layers
    ]
    return PackedCache(IndexCache(layers), packed, questions)


def model_config(name: str) -> PreTrainedConfig:
    """Return a config by its name, or read it from a folder.

    Raises:
        UsageError: the config does not exist or cannot be read, or its attention has sliding windows or a soft cap,
            which torch's dense attention does not support.
    """
    if name in CONFIGS:
        return CONFIGS[name]()
    if not (Path(name) / "config.json").is_file():
        raise UsageError(f"--config {name}: {choose_one(name, CONFIGS)}, or give a folder with a config.json")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name).get_text_config()
    except (ValueError, OSError) as error:
        raise UsageError(
            f"--config {name}: transformers cannot read its config.json: {error}; correct it, or name another folder"
        ) from None
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "attn_logit_softcapping", None):
        raise UsageError(
            f"--config {name}: its attention has sliding windows or a soft cap, which torch's dense "
            "attention, the baseline, does not support; choose another model"
        )
    return config


def head_dim(config: PreTrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def random_model(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Create a model with random weights on the device; allocates the weights once."""
    torch.manual_seed(seed)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval()
    return model


@torch.no_grad()
def make_queries_alike(model: PreTrainedModel, share: float) -> bool:
    """Give each layer's `q_proj` a random bias, so that the queries of all tokens have a common part.

    The norm of the common part is `share` of a query's norm. Queries of a trained model have a common part too. With
    random weights alone, several questions over one context would have unrelated queries and selections. Returns False
    if the model has no `q_proj`.
    """
    projections = [module for name, module in model.named_modules() if name.endswith("q_proj")]
    for module in projections:
        assert isinstance(module, torch.nn.Linear)
        # Standard deviation of a query's channels, for inputs of unit variance.
        own = float(module.weight.std()) * math.sqrt(module.in_features)
        common = torch.randn(module.out_features, dtype=module.weight.dtype, device=module.weight.device)
        module.bias = torch.nn.Parameter(common * own * share / math.sqrt(1 - share**2))
    return bool(projections)


NOTHING = "no attention"
WARM_UPS, FORM_RUNS = 3, 10


@dataclass(frozen=True)
class ModelRow:
    """Times of the steps with one attention method at one budget.

    Attributes:
        weights: precision of the linear layers' weights; None: the dtype of the other tensors.
        median_ms, lower_ms, upper_ms: median and quartiles of a step's milliseconds.
        timed: `graph`, `eager` or `wall clock`.
        tokens_per_second: tokens of all sequences of the batch together, per second of the mean step.
        speedup: `tokens_per_second` divided by that of the fastest of `dense_forms` with the same weights.
        kv_fraction: number of D-sized rows of the index and of the middle (the tokens between sinks and tail) that a
            step reads, divided by the number of the middle's key and value rows.
    """

    method: str
    variant: str
    weights: Weights | None
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
    """Times a model at one context length and batch. All layers of the model use the data of a few distinct layers.

    Args:
        weights: the precision to which the model's weights are rounded; None: they are not rounded.
        tell: called with a line of text for each result.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: Weights | None,
        data: list[LayerData],
        runs: int,
        tell: Callable[[str], None],
    ):
        self.model, self.weights, self.data, self.runs, self.tell = model, weights, data, runs, tell
        self.layers = int(model.config.num_hidden_layers)
        self.dense_ms, self.batch = float("nan"), data[0].batch * data[0].questions

    @torch.inference_mode()
    def dense(self) -> Iterator[ModelRow]:
        """Time steps with the fastest of `dense_forms`, with this project's dense attention, and without attention.

        The fastest form is the baseline of all speed-ups. A step without attention shows the time of the model's other
        operations.
        """
        name = self._fastest_form()
        forms = [dict(dense_forms(data))[name] for data in self.data]
        torchs = self._time(self._each(lambda data, turn: DenseFormLayer(data, forms[turn])))
        self.dense_ms = torchs.mean
        yield self._row(DENSE, name, None, torchs, 1.0)
        own = self._each(lambda data, turn: dense_layer(data))
        yield self._row(DENSE, OWN, None, self._time(own), 1.0)
        none = self._each(lambda data, turn: DenseFormLayer(data, lambda query: query.clone()))
        yield self._row(NOTHING, "", None, self._time(none), 0.0)

    @torch.inference_mode()
    def sparse(self, form: MethodSpec, contexts: list[MiddleContext], budgets: list[Budget]) -> Iterator[ModelRow]:
        """Time a variant of a method at each budget; `dense` must be called first.

        Allocates a copy of the keys and values between sinks and tail in the method's layout.

        Args:
            contexts: the method's input for each distinct layer.

        Raises:
            RefusedError: the logits are not finite, or several questions cannot share a step.
        """
        laid_out: dict[int, MiddleRows] = {}
        for budget in budgets:
            layers = self._sparse_layers(DecodeConfig(form, budget), form.method, contexts, laid_out)
            timed = self._time(layers, form.method.cycle())
            yield self._row(form.name, form.variant, budget, timed, IndexCache(layers).kv_fraction())

    def _sparse_layers(
        self, config: DecodeConfig, method: Method, contexts: list[MiddleContext], laid_out: dict[int, MiddleRows]
    ) -> list[StoredLayer]:
        layers: list[StoredLayer] = []
        shared: dict[str, object] = {}
        for number in range(self.layers):
            turn = number % len(self.data)
            context = replace(contexts[turn], position=LayerPosition(number, self.layers, shared))
            selector = prepare_selector(method, context)
            if turn not in laid_out:
                laid_out[turn] = place_rows(self.data[turn], selector)
            layer = sparse_layer(self.data[turn], laid_out[turn], selector, config)
            if self.data[turn].questions > 1:
                refuse_unshared(method, layer.plan, f"a model's step with {type(method).__name__}")
            layers.append(layer)
        return layers

    def _each(self, make: Callable[[LayerData, int], StoredLayer]) -> list[StoredLayer]:
        """Create a cache layer for each layer of the model; `make` gets an element of `self.data` and its index."""
        turns = [number % len(self.data) for number in range(self.layers)]
        return [make(self.data[turn], turn) for turn in turns]

    def _fastest_form(self) -> str:
        clock = clock_for(self.model.device, FORM_RUNS, cold=True)
        taken = {
            name: clock.time(lambda form=form: form(self.data[0].query)).median  # type: ignore[misc]
            for name, form in dense_forms(self.data[0])
        }
        return min(taken, key=lambda name: taken[name])

    def _time(self, layers: list[StoredLayer], cycle: int = 1) -> Timing:
        """Time greedy decode steps. Each run is `cycle` steps, because a method may select in only one of them."""
        device, steps = self.model.device, self._steps(layers, WARM_UPS + self.runs * cycle)
        with steps.routed():
            tokens = torch.arange(self.batch, device=device)[:, None]
            for _ in range(WARM_UPS):
                tokens = steps(tokens).argmax(-1, keepdim=True)
            stopwatch: _Stopwatch | _CudaStopwatch = _CudaStopwatch() if device.type == "cuda" else _Stopwatch()
            for _ in range(self.runs):
                for _ in range(cycle):
                    logits = steps(tokens)
                    tokens = logits.argmax(-1, keepdim=True)
                stopwatch.lap()
            taken = [lap / cycle for lap in stopwatch.milliseconds()]
        how = "wall clock" if device.type == "cpu" else "graph" if steps.captured() else "eager"
        return Timing.of(taken, how, logits)

    def _steps(self, layers: list[StoredLayer], tokens: int) -> TimedSteps:
        data = self.data[0]
        cache = packed_cache(layers, data.questions) if data.questions > 1 else IndexCache(layers, batch=data.batch)
        return TimedSteps(self.model, cache, data.split.tokens, tokens)

    def _row(self, name: str, variant: str, budget: Budget | None, timed: Timing, kv_fraction: float) -> ModelRow:
        split, batch = self.data[0].split, self.batch
        if not bool(timed.output.isfinite().all()):
            raise RefusedError(f"{name} {variant} over {split.tokens:,} tokens, batch {batch}, gave no finite logits")
        rate = 1000 * batch / timed.mean
        of_weights = "" if self.weights is None else f", {self.weights} weights"
        self.tell(
            f"{name} {variant}{of_weights}: {timed.median:.2f} ms a step, {rate:,.1f} tokens a second, {timed.how}"
        )
        return ModelRow(
            method=name,
            variant=variant,
            weights=self.weights,
            context=split.tokens,
            batch=batch,
            budget=None if budget is None else budget.value,
            median_ms=timed.median,
            lower_ms=timed.lower,
            upper_ms=timed.upper,
            runs=self.runs,
            timed=timed.how,
            tokens_per_second=rate,
            speedup=self.dense_ms / timed.mean,
            kv_fraction=kv_fraction,
        )


class _Stopwatch:
    """Measures the milliseconds between laps by the host's clock. The first lap starts at construction."""

    def __init__(self) -> None:
        self.marks = [time.perf_counter()]

    def lap(self) -> None:
        self.marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        return [1000 * (stop - start) for start, stop in pairwise(self.marks)]


class _CudaStopwatch:
    """Measures the milliseconds between laps by CUDA events, including the time that the GPU waits for the host."""

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
