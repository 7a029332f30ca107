"""`sparsekv bench --end-to-end`: tokens a second of a whole model, dense and with methods."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.table import Table

from sparsekv.cli.common.console import note, say, show
from sparsekv.cli.common.method_options import refuse_unused
from sparsekv.cli.common.small_budgets import note_small_budgets
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.indexing.indexers.interface import Indexer
from sparsekv.indexing.models.load import DTYPES, choose_device
from sparsekv.runtime.benchmark.configs import head_dim, model_config, random_model
from sparsekv.runtime.benchmark.end_to_end import Distinct, ModelBench, ModelRow
from sparsekv.runtime.benchmark.indexed_layers import index_mixture
from sparsekv.runtime.benchmark.layer import LayerData
from sparsekv.runtime.benchmark.layer_timer import check_runs, configured, machine
from sparsekv.runtime.benchmark.rows import RefusedError
from sparsekv.runtime.benchmark.sources import Mixtures, Wanted, check_dtype
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.context import MiddleContext
from sparsekv.runtime.selection.interface import Method
from sparsekv.runtime.selection.registry import methods

DEFAULT_METHODS, DISTINCT = ["multipole"], 2
DEFAULT_CONFIG = {"cpu": "smollm2-135m", "cuda": "qwen3-8b"}
DEFAULT_CONTEXTS = {"cpu": ["8K"], "cuda": ["128K"]}
RUNS = {"cpu": 10, "cuda": 30}


@dataclass(frozen=True)
class EndToEnd:
    """What a person asked for; None or nothing where it is left to the device."""

    config: str | None
    distinct: int | None
    wanted: Wanted
    methods: list[str]
    budgets: list[str]
    runs: int | None
    device: str


def time_models(
    what: EndToEnd, parameters: dict[str, Any], elsewhere: Mapping[str, Any], *, as_json: bool, quiet: bool
) -> None:
    """Time everything and print it.

    Args:
        elsewhere: options of `bench` that mean nothing here, by name.

    Raises:
        UsageError: one of those was set, or an option's value makes no sense.
        SparsekvError: the model and its layers do not fit the device's memory, or a method gave what is no number.
    """
    for name, value in elsewhere.items():
        if value not in (None, False):
            raise UsageError(f"--{name.replace('_', '-')}: means nothing with --end-to-end; leave it out")
    timer = _Timer(what, parameters, quiet=quiet)
    try:
        rows = timer.run()
    except torch.OutOfMemoryError:
        raise SparsekvError(
            f"the model and {timer.distinct} layers of keys and values, each twice, do not fit the memory of "
            f"{timer.device}; choose a smaller --context, --batch or --distinct-layers"
        ) from None
    about = timer.about()
    if as_json:
        say(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        _print(rows, about)
    if timer.refused:
        raise SparsekvError("; ".join(timer.refused))


class _Timer:
    """One model with all contexts, batches, methods and budgets."""

    def __init__(self, what: EndToEnd, parameters: dict[str, Any], *, quiet: bool):
        self.device = choose_device(what.device)
        kind = self.device.type
        self.name = what.config or DEFAULT_CONFIG[kind]
        self.config = model_config(self.name)
        self.distinct = DISTINCT if what.distinct is None else what.distinct
        layers = int(self.config.num_hidden_layers)
        if not 1 <= self.distinct <= layers:
            raise UsageError(f"--distinct-layers {self.distinct}: give 1 to {layers}, which is how many the model has")
        self.budgets = [Budget.parse(text) for text in dict.fromkeys(what.budgets)]
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
        self.source = Mixtures(wanted, self.device)
        self.chosen = {name: methods()[name] for name in self.source.methods(what.methods or DEFAULT_METHODS)}
        self.built = self.source.indexers(list(self.chosen), parameters)
        building: dict[str, type] = {f"the index of {name}": type(one) for name, one in self.built.items()}
        refuse_unused(self.chosen | building, parameters)
        self.forms = partial(configured, parameters)
        for one in self.chosen.values():
            self.forms(one, None)
        note_small_budgets(self.budgets, quiet=quiet)
        self.tell, self.refused = partial(note, quiet=quiet), list[str]()

    def run(self) -> list[ModelRow]:
        """Memory: the model, and the distinct layers twice, in order of position and in one method's layout."""
        self.tell(f"making {self.name} with random weights, and {self.distinct} layers of keys and values for its own")
        model = random_model(self.config, self.device, DTYPES[self.source.dtype], self.source.seed)
        rows: list[ModelRow] = []
        for context in dict.fromkeys(self.source.contexts):
            for batch in dict.fromkeys(self.source.batches):
                data = [self.source.layer(context, batch, self.built, number) for number in range(self.distinct)]
                rows += self._time(ModelBench(model, data, self.runs, self.tell))
                del data  # or else the next ones would be made beside them
        return rows

    def _time(self, bench: ModelBench) -> list[ModelRow]:
        rows = list(bench.dense())
        for name, method in self.chosen.items():
            for variant, one in self.forms(method, None).items():
                try:
                    rows += bench.sparse(self._distinct(bench.data, name, variant, one), self.budgets)
                except RefusedError as error:
                    self.refused.append(str(error))
        return rows

    def _distinct(self, data: list[LayerData], name: str, variant: str, method: Method) -> Distinct:
        return Distinct(name, variant, method, [_context(one, self.built.get(name)) for one in data])

    def about(self) -> dict[str, Any]:
        """What a reader of the figures has to know."""
        return {
            "machine": machine(self.device),
            "torch": torch.__version__,
            "device": str(self.device),
            "config": self.name,
            "layers": int(self.config.num_hidden_layers),
            "distinct_layers": self.distinct,
            **self.source.about(),
            "indices": {name: asdict(one) for name, one in self.built.items()},
            "refused": self.refused,
        }


def _context(data: LayerData, indexer: Indexer | None) -> MiddleContext:
    context = index_mixture(data, indexer).context
    # In the form that selectors want it in: all layers of the model share it then, where each would have its own.
    long = {name: one.long() for name, one in context.tensors.items() if name == "token_order"}
    return replace(context, tensors=context.tensors | long)


def _print(rows: list[ModelRow], about: dict[str, Any]) -> None:
    table = Table(
        title=f"{about['config']}, random weights, {about['layers']} layers that take turns with the keys and values "
        f"of {about['distinct_layers']}, {about['dtype']}, {about['machine']}",
        title_justify="left",
        title_style="",
    )
    table.add_column("method")
    for name in ("context", "batch", "budget", "ms a step [quartiles]", "tokens/s", "speed-up", "KV read", "timed"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.method} {row.variant}".strip(),
            f"{row.context:,}",
            str(row.batch),
            "" if row.budget is None else str(Budget(row.budget)),
            f"{row.median_ms:.2f} [{row.lower_ms:.2f}, {row.upper_ms:.2f}]",
            f"{row.tokens_per_second:,.1f}",
            f"{row.speedup:.2f}",
            f"{row.kv_fraction:.3f}",
            row.timed,
        )
    show(table, width=140)
