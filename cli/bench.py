"""`sparsekv bench`: time a decode step of one layer, with each method and with dense attention."""

from dataclasses import fields

import typer

from sparsekv.cli.benchmarking.options import ITERATIONS, BenchOptions
from sparsekv.cli.common.method_options import with_options
from sparsekv.cli.common.options import refuse_unwritable_plot
from sparsekv.cli.configuring.sources import Command
from sparsekv.indexing.indexers.interface import Indexer, indexers
from sparsekv.runtime.selection.interface import methods

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=Command)
@with_options(
    BenchOptions,
    methods() | {f"the index of {name}": indexer for name, indexer in indexers().items()},
    preset=fields(Indexer),
    defaults={"iterations": ITERATIONS},
)
def bench(options: BenchOptions) -> None:
    """Time one decode step of one layer, from the query to the output, selection included.

    Keys, values and queries are synthetic (a mixture of clusters of uneven sizes, indexed with few iterations of
    k-means), or those of a layer of an --index. The table has a row for each method at each budget.

    \b
    speed-up  Time of the fastest dense attention of other libraries in the same
              run, divided by the method's time. The libraries are torch and, if
              installed, FlashAttention-3 (on a Hopper GPU: fa3-fwd of PyPI).
    kv fraction
              Key, value and index rows that the method reads, as a share of
              the document's key and value rows.
    MB        What a step must read: the selected tokens, sinks, tail, index.
    of floor  The time in which a memory copy moves that much, as a share of
              the step's time.
    error     Relative error of the output against dense attention.
    timed     graph: the step is replayed as a CUDA graph. eager: the step
              cannot be captured, because the method waits for the GPU.
              wall clock: on a CPU.

    With --shared, a step serves --batch questions over one document, as in `generate --batch-file`: each question
    attends to the tokens that any of them selects. Dense attention, too, reads the document once for all questions.

    \b
    sparsekv bench
    sparsekv bench --method multipole --context 128K --batch 1 --batch 16 --budget 5% --plot steps.png
    sparsekv bench --shared --batch 1 --batch 16 --index manual.skv --method codes --budget 5% --budget 1%
    sparsekv bench --method squeezed --variants --index manual.skv --layer 12 --json > steps.json
    """
    options.format.check()
    refuse_unwritable_plot(options.plot)
    # Imported here, so that --help does not wait seconds for transformers.
    from sparsekv.cli.benchmarking.layer_steps import run

    run(options)
