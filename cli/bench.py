"""`sparsekv bench`: time a decode step of one layer, with each method and with dense attention."""

from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from sparsekv.cli.benchmarking.output import DEFAULT_BUDGETS, ITERATIONS, StepOptions, mixture_indexers, print_rows
from sparsekv.cli.common.console import note
from sparsekv.cli.common.method_options import note_small_budgets, with_options
from sparsekv.cli.common.open_artifact import open_artifact
from sparsekv.cli.common.options import FormatOptions, RunOptions, names_of, refuse_unwritable_plot
from sparsekv.cli.common.process import resume_collector
from sparsekv.cli.configuring.sources import Command, on_command_line
from sparsekv.formats.device import choose_device
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.models.load import check_dtype
from sparsekv.indexing.indexers.interface import Indexer, indexers
from sparsekv.runtime.benchmark.clock import clock_for
from sparsekv.runtime.benchmark.layer_timer import Forms, Timed, Timer, check_runs, configured, machine
from sparsekv.runtime.benchmark.sources import DEFAULT_METHODS, Mixtures, Source, StoredLayerSource
from sparsekv.runtime.selection.interface import Budget, methods
from sparsekv.runtime.selection.registry import refuse_unused

app = typer.Typer(rich_markup_mode=None, add_completion=False)

RUNS = {"cpu": 20, "cuda": 50}


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Command-line options of `bench`."""

    ctx: typer.Context
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Method to time, or `all`; repeatable. Default: {', '.join(DEFAULT_METHODS)}.",
            autocompletion=names_of(methods, "all"),
        ),
    ] = None
    variants: Annotated[
        bool, typer.Option("--variants", help="Time every variant of each method that recall-report compares.")
    ] = False
    context: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKENS",
            help="Tokens of context, such as 32768 or 128K; repeatable. Default: 8K and 32K; CUDA: 128K.",
        ),
    ] = None
    steps: StepOptions
    heads: Annotated[int | None, typer.Option(help="Number of query heads. Default: 9; CUDA: 32.")] = None
    kv_heads: Annotated[int | None, typer.Option(help="Number of KV heads. Default: 3; CUDA: 8.")] = None
    head_dim: Annotated[int | None, typer.Option(help="Channels per head. Default: 64; CUDA: 128.")] = None
    index: Annotated[
        Path | None,
        typer.Option("--index", "-i", metavar="NAME.skv", help="Time a layer of this index, not synthetic data."),
    ] = None
    layer: Annotated[int | None, typer.Option(help="Layer of the --index. Default: the middle one.")] = None
    runs: Annotated[int | None, typer.Option(help="Runs per step. Default: 20; CUDA: 50.")] = None
    warm: Annotated[
        bool,
        typer.Option(
            "--warm",
            help="Do not flush the CPU's or GPU's caches between runs. In a model they are cold: other "
            "layers run in between.",
        ),
    ] = False
    format: FormatOptions
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Plot speed-up against context length (with --shared, against the number of questions), and time "
            "against bytes read.",
        ),
    ] = None
    run: RunOptions
    parameters: dict[str, Any]


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
    where = choose_device(options.run.device)
    resume_collector()
    runs = check_runs(RUNS[where.type] if options.runs is None else options.runs)
    timer = _timer(options, where)
    note_small_budgets(timer.budgets, quiet=options.run.quiet)
    note(f"timing {', '.join(timer.methods)}", quiet=options.run.quiet)
    timed = timer.run(clock_for(where, runs, cold=not options.warm))
    about = _about(options, timer, timed, where)
    if options.plot is not None:
        from sparsekv.cli.benchmarking.plots import plot_steps

        title = f"A decode step of one layer, {about['machine']}"
        plot_steps(timed.rows, timed.copy_bandwidth, title, options.plot, shared=options.steps.shared)
        note(f"plot: {options.plot}", quiet=options.run.quiet)
    print_rows(timed.rows, about, options.format)
    if timed.refused:
        raise SparsekvError("; ".join(timed.refused))


def _timer(options: BenchOptions, where: torch.device) -> Timer:
    """Make the timer that the options describe.

    Raises:
        UsageError: a value of an option is not valid, a method does not exist, or no chosen method reads an option.
        SparsekvError: an error of `open_artifact`.
    """
    parameters, budgets = options.parameters, Budget.parse_each(options.steps.budget or DEFAULT_BUDGETS)
    check_dtype(options.run.dtype)
    source = _source(options, where)
    chosen, built = {name: methods()[name] for name in source.methods(options.method or [])}, {}
    if isinstance(source, Mixtures):
        built = mixture_indexers(list(chosen), parameters, options.steps.seed, source.head_dim)
    building: dict[str, type] = {f"the index of {name}": type(one.parameters) for name, one in built.items()}
    refuse_unused(building if options.variants else chosen | building, parameters, decoding=chosen)
    forms: Forms = (
        (lambda method, record: dict(method.variants(record))) if options.variants else partial(configured, parameters)
    )
    # Wrong parameters are refused here, before anything is measured.
    for one in chosen.values():
        forms(one, None)
    return Timer(source, chosen, built, forms, budgets, partial(note, quiet=options.run.quiet))


def _source(options: BenchOptions, where: torch.device) -> Source:
    wanted = options.steps.wanted(options.context, options.run.dtype)
    wanted = replace(wanted, heads=options.heads, kv_heads=options.kv_heads, head_dim=options.head_dim)
    if options.index is not None:
        if on_command_line(options.ctx, "seed"):
            raise UsageError(f"--seed {wanted.seed} has no effect with --index, which has no random data; leave it out")
        return StoredLayerSource(open_artifact(options.index, thorough=True), options.layer, wanted, where)
    if options.layer is not None:
        raise UsageError(
            f"--layer {options.layer}: synthetic data has one layer; leave --layer out, or give an --index"
        )
    return Mixtures(wanted, where, list(indexers()))


def _about(options: BenchOptions, timer: Timer, timed: Timed, where: torch.device) -> dict[str, Any]:
    """Return facts that are shown with the results, by name.

    They are the machine, the settings of the measurement, the bandwidth of a copy, and why steps are missing.
    """
    return {
        "machine": machine(where),
        "torch": torch.__version__,
        "device": str(where),
        **timer.source.about(),
        "shared": options.steps.shared,
        "caches": "warm" if options.warm else "cold",
        "copy_bandwidth": timed.copy_bandwidth,
        "indices": {name: asdict(one.parameters) for name, one in timer.built.items()},
        "refused": timed.refused,
    }
