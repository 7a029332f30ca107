"""Time the decode steps of a whole model with random weights, for dense attention and for sparse methods."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from sparsekv.formats.device import choose_device
from sparsekv.formats.errors import SparsekvError, UsageError, check_choice
from sparsekv.formats.index.schema import Weights
from sparsekv.formats.models.load import DTYPES, check_dtype
from sparsekv.kernels.linear.quantised import quantise_linears
from sparsekv.runtime.benchmark.end_to_end import (
    ModelBench,
    ModelRow,
    head_dim,
    make_queries_alike,
    model_config,
    random_model,
)
from sparsekv.runtime.benchmark.layer import ALIKE, LayerData
from sparsekv.runtime.benchmark.layer_timer import RefusedError, check_runs, configured, machine
from sparsekv.runtime.benchmark.settings import MODEL_METHODS, Wanted
from sparsekv.runtime.benchmark.sources import LayerIndexer, Mixtures, index_mixture
from sparsekv.runtime.decoding.compiled import MODES, compile_layers
from sparsekv.runtime.decoding.load import BITS
from sparsekv.runtime.selection.interface import Budget, MethodSpec, MiddleContext, methods
from sparsekv.runtime.selection.registry import refuse_unused

DISTINCT = 2
DEFAULT_CONFIG = {"cpu": "smollm2-135m", "cuda": "qwen3-8b"}
DEFAULT_CONTEXTS = {"cpu": ["8K"], "cuda": ["128K"]}
RUNS = {"cpu": 10, "cuda": 30}


@dataclass(frozen=True)
class EndToEnd:
    """Options of the end-to-end benchmark.

    If `config`, `distinct` or `runs` is None, or `methods` or the contexts of `wanted` are empty, a default is used.
    """

    config: str | None
    distinct: int | None
    wanted: Wanted
    methods: list[str]
    budgets: list[str]
    runs: int | None
    device: str
    compiled: str
    weights: list[Weights | None]


class ModelTimer:
    """Times one model at all context lengths and batches, with all methods and budgets.

    Args:
        indexed: names of the methods that store tensors in an index.
        indexers: returns an indexer for each named method that stores tensors in an index.
        report: called with a line of text at the start, and for each result.
    """

    def __init__(
        self,
        what: EndToEnd,
        parameters: Mapping[str, Any],
        indexed: Sequence[str],
        indexers: Callable[..., dict[str, LayerIndexer]],
        report: Callable[[str], None],
    ):
        self.device = choose_device(what.device)
        kind = self.device.type
        check_choice("--compile", what.compiled, MODES)
        self.compiled = what.compiled == "on" or (what.compiled == "auto" and kind == "cuda")
        self.name = what.config or DEFAULT_CONFIG[kind]
        self.config = model_config(self.name)
        self.distinct = DISTINCT if what.distinct is None else what.distinct
        layers = int(self.config.num_hidden_layers)
        if not 1 <= self.distinct <= layers:
            raise UsageError(
                f"--distinct-layers {self.distinct}: the model has {layers} layers; give a number from 1 to {layers}"
            )
        self.budgets = Budget.parse_each(what.budgets)
        self.runs = check_runs(RUNS[kind] if what.runs is None else what.runs)
        check_dtype(what.wanted.dtype)
        heads = int(self.config.num_attention_heads)
        wanted = replace(
            what.wanted,
            contexts=what.wanted.contexts or DEFAULT_CONTEXTS[kind],
            heads=heads,
            kv_heads=int(getattr(self.config, "num_key_value_heads", None) or heads),
            head_dim=head_dim(self.config),
        )
        self.source = Mixtures(wanted, self.device, indexed)
        self.chosen = {name: methods()[name] for name in self.source.methods(what.methods or MODEL_METHODS)}
        self.built = indexers(list(self.chosen), head_dim=head_dim(self.config))
        building: dict[str, type] = {f"the index of {name}": type(one.parameters) for name, one in self.built.items()}
        refuse_unused(self.chosen | building, parameters, decoding=self.chosen)
        self.forms = partial(configured, parameters)
        for one in self.chosen.values():
            self.forms(one, None)
        self.weights = list(dict.fromkeys(what.weights))
        self.report, self.refused = report, list[str]()

    def run(self) -> list[ModelRow]:
        """Time dense attention and each method at each budget, for all weights, context lengths and batches.

        `refused` gets the reason for each method that cannot run. Allocates the model, and the keys and values of the
        distinct layers twice: in the order of positions, and in the layout of one method. The other layers of the model
        use the same keys and values.

        Raises:
            SparsekvError: model and layers do not fit the device's memory.
        """
        try:
            return self._run()
        except torch.OutOfMemoryError:
            raise SparsekvError(
                f"the model and {self.distinct} layers of keys and values, each twice, do not fit the memory of "
                f"{self.device}; choose a smaller --context, --batch or --distinct-layers"
            ) from None

    def _run(self) -> list[ModelRow]:
        self.report(
            f"making {self.name} with random weights; its layers share the keys and values of {self.distinct} layers"
        )
        rows: list[ModelRow] = []
        for weights in self.weights:
            model = self._model(weights)
            for context in dict.fromkeys(self.source.contexts):
                for batch in dict.fromkeys(self.source.batches):
                    data = [self.source.layer(context, batch, self.built, number) for number in range(self.distinct)]
                    # Without the reset, torch would compile for any number of questions once it has seen two numbers.
                    torch._dynamo.reset()
                    hook = compile_layers(model, shape=(data[0].batch, data[0].questions)) if self.compiled else None
                    rows += self._time(ModelBench(model, weights, data, self.runs, self.report))
                    if hook is not None:
                        hook.remove()
                    del data  # free the layers before the next layers are generated
            del model  # free the model's weights before the next weights are drawn
        return rows

    def _model(self, weights: Weights | None) -> PreTrainedModel:
        model = random_model(self.config, self.device, DTYPES[self.source.dtype], self.source.seed)
        if self.source.shared and not make_queries_alike(model, ALIKE):
            self.report("the queries of questions have no common part: no layer of the model has a q_proj")
        if weights is not None:
            quantise_linears(model, BITS[weights])
        return model

    def _time(self, bench: ModelBench) -> list[ModelRow]:
        rows = list(bench.dense())
        for name, method in self.chosen.items():
            for variant, one in self.forms(method, None).items():
                try:
                    contexts = [_context(data, self.built.get(name)) for data in bench.data]
                    rows += bench.sparse(MethodSpec(name, variant, one), contexts, self.budgets)
                except RefusedError as error:
                    self.refused.append(str(error))
        return rows

    def about(self) -> dict[str, Any]:
        """Return the settings of the measurement. They are shown with the results."""
        return {
            "machine": machine(self.device),
            "torch": torch.__version__,
            "device": str(self.device),
            "config": self.name,
            "layers": int(self.config.num_hidden_layers),
            "distinct_layers": self.distinct,
            "compiled": self.compiled,
            "shared": self.source.shared,
            **self.source.about(),
            "indices": {name: asdict(one.parameters) for name, one in self.built.items()},
            "refused": self.refused,
        }


def _context(data: LayerData, indexer: LayerIndexer | None) -> MiddleContext:
    context = index_mixture(data, indexer).context
    # Selectors need int64. Converting here makes one tensor for all layers instead of a copy for each layer.
    long = {name: one.long() for name, one in context.tensors.items() if name == "token_order"}
    return replace(context, tensors=context.tensors | long)
