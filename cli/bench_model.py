"""`sparsekv bench-model`: time a decode step of a whole model, with each method and with dense attention."""

from dataclasses import fields
from functools import partial

import typer

from sparsekv.cli.benchmarking.options import DEFAULT_BUDGETS, ITERATIONS, BenchModelOptions
from sparsekv.cli.common.console import note
from sparsekv.cli.common.method_options import note_budgets, with_options
from sparsekv.cli.configuring.sources import Command
from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.index.schema import AUTO, weights_named
from sparsekv.indexing.indexers.interface import Indexer, indexers
from sparsekv.runtime.selection.interface import methods

app = typer.Typer(rich_markup_mode=None, add_completion=False)


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
    # Imported here, so that --help does not wait seconds for transformers.
    from sparsekv.cli.benchmarking.output import mixture_indexers, print_model_rows
    from sparsekv.runtime.benchmark.model_timer import EndToEnd, ModelTimer

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
    note_budgets(timer.budgets, quiet=options.run.quiet)
    rows = timer.run()
    print_model_rows(rows, timer.about(), options.format)
    if timer.refused:
        raise SparsekvError("; ".join(timer.refused))
