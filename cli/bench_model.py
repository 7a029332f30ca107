"""`sparsekv bench-model`: time a decode step of a whole model, with each method and with dense attention."""

from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any

import typer

from sparsekv.cli.benchmarking.output import (
    DEFAULT_BUDGETS,
    ITERATIONS,
    StepOptions,
    mixture_indexers,
    print_model_rows,
)
from sparsekv.cli.common.console import note
from sparsekv.cli.common.method_options import note_small_budgets, with_options
from sparsekv.cli.common.options import RunOptions, TableOptions, names_of
from sparsekv.cli.configuring.sources import Command
from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.index.schema import AUTO, weights_named
from sparsekv.indexing.indexers.interface import Indexer, indexers
from sparsekv.runtime.benchmark.end_to_end import CONFIGS
from sparsekv.runtime.benchmark.model_timer import DEFAULT_METHODS, EndToEnd, ModelTimer
from sparsekv.runtime.selection.interface import methods

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@dataclass(frozen=True, kw_only=True)
class BenchModelOptions:
    """Command-line options of `bench-model`."""

    config: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FOLDER",
            help=f"Shape of the model: {', '.join(CONFIGS)}, or a folder with a config.json. Default: "
            "smollm2-135m; CUDA: qwen3-8b.",
            autocompletion=names_of(lambda: CONFIGS),
        ),
    ] = None
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Method to time, or `all`; repeatable. Default: {', '.join(DEFAULT_METHODS)}.",
            autocompletion=names_of(methods, "all"),
        ),
    ] = None
    context: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKENS", help="Tokens of context, such as 32768 or 128K; repeatable. Default: 8K; CUDA: 128K."
        ),
    ] = None
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="auto|int8|int4",
            help="Precision to which the weights of linear layers are rounded: auto (not rounded), int8 or int4; "
            "repeatable. Default: auto.",
            autocompletion=lambda: ["auto", "int8", "int4"],
        ),
    ] = None
    steps: StepOptions
    distinct_layers: Annotated[
        int | None,
        typer.Option(
            help=("Number of layers for which keys and values are generated; all layers use these in turn. Default: 2.")
        ),
    ] = None
    runs: Annotated[int | None, typer.Option(help="Runs per step. Default: 10; CUDA: 30.")] = None
    compiled: Annotated[
        str,
        typer.Option(
            "--compile",
            metavar="auto|on|off",
            help=(
                "Compile the model's layers with torch, except their attention, for every row of the table. "
                "auto: on a GPU."
            ),
        ),
    ] = "auto"
    format: TableOptions
    run: RunOptions
    parameters: dict[str, Any]


@app.command(cls=Command)
@with_options(
    BenchModelOptions,
    methods() | {f"the index of {name}": one for name, one in indexers().items()},
    preset=fields(Indexer),
    defaults={"iterations": ITERATIONS},
)
def bench_model(options: BenchModelOptions) -> None:
    """Time decode steps of a whole model with random weights, of the shape of --config.

    Each step is fed with the tokens of the step before. The steps run with the fastest dense attention of other
    libraries, with sparsekv's dense attention, without attention, and with each --method at each budget. The other
    libraries are torch and, where it is installed, FlashAttention-3. To fit into memory, the model's layers take turns
    with the keys and values of a few layers. All of these steps run once for each of several --weights; speed-ups are
    over dense attention with the same weights.

    With --shared, a step serves --batch questions over one document, as in `generate --batch-file`. The synthetic
    queries of all questions have a part in common, as the queries of a trained model have.

    \b
    sparsekv bench-model
    sparsekv bench-model --config qwen3-8b --context 128K --batch 16 --method multipole --budget 5%
    """
    options.format.check()
    what = EndToEnd(
        options.config,
        options.distinct_layers,
        options.steps.wanted(options.context, options.run.dtype),
        options.method or [],
        options.steps.budget or DEFAULT_BUDGETS,
        options.runs,
        options.run.device,
        options.compiled,
        [weights_named(one) for one in options.weights or [AUTO]],
    )
    building = partial(mixture_indexers, parameters=options.parameters, seed=options.steps.seed)
    report = partial(note, quiet=options.run.quiet)
    timer = ModelTimer(what, options.parameters, list(indexers()), building, report)
    note_small_budgets(timer.budgets, quiet=options.run.quiet)
    rows = timer.run()
    print_model_rows(rows, timer.about(), options.format)
    if timer.refused:
        raise SparsekvError("; ".join(timer.refused))
