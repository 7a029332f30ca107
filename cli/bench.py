"""`sparsekv bench`: time a decode step of one layer, or of a whole model, with each method and with dense attention."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from sparsekv.cli.benchmarking.output import mixture_indexers, print_rows, time_models
from sparsekv.cli.common.console import note
from sparsekv.cli.common.index_option import open_artifact
from sparsekv.cli.common.method_options import note_small_budgets, with_method_options
from sparsekv.cli.common.options import (
    DeviceOption,
    DtypeOption,
    GroupedCommand,
    JsonOption,
    QuietOption,
    names_of,
    refuse_unwritable_plot,
)
from sparsekv.cli.common.process import resume_collector
from sparsekv.formats.device import choose_device
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.index.schema import AUTO, KV_DTYPES, MethodRecord, kv_dtype_named
from sparsekv.formats.models.load import check_dtype
from sparsekv.indexing.indexers.interface import indexers
from sparsekv.runtime.benchmark.clock import clock_for
from sparsekv.runtime.benchmark.end_to_end import CONFIGS
from sparsekv.runtime.benchmark.layer_timer import Timer, check_runs, configured, machine
from sparsekv.runtime.benchmark.model_timer import EndToEnd
from sparsekv.runtime.benchmark.sources import DEFAULT_METHODS, Mixtures, Source, StoredLayerSource, Wanted
from sparsekv.runtime.selection.interface import Budget, Method
from sparsekv.runtime.selection.registry import methods, refuse_unused

app = typer.Typer(rich_markup_mode=None, add_completion=False)

DEFAULT_BUDGETS = ["5%", "10%"]
RUNS = {"cpu": 20, "cuda": 50}


@app.command(cls=GroupedCommand)
@with_method_options(methods() | {f"the index of {name}": indexer for name, indexer in indexers().items()})
def bench(
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Method to time, or `all`; repeatable. Default: {', '.join(DEFAULT_METHODS)}.",
            autocompletion=names_of(methods, "all"),
        ),
    ] = None,
    variants: Annotated[
        bool, typer.Option("--variants", help="Time every form of each method that recall-report compares.")
    ] = False,
    context: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKENS",
            help="Tokens of context, such as 32768 or 128K; repeatable. Default: 8K and 32K, with --end-to-end 8K; "
            "CUDA: 128K.",
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Contexts per batch, or with --shared questions over one context; repeatable. Default: 1."),
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Time the questions of a --batch over one context, which they share.")
    ] = False,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="Share (0.05, 5%) or number of tokens to attend to; repeatable. Default: 5% and 10%."),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads. Default: 9; CUDA: 32.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads. Default: 3; CUDA: 8.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Channels per head. Default: 64; CUDA: 128.")] = None,
    index: Annotated[
        Path | None,
        typer.Option("--index", "-i", metavar="NAME.skv", help="Time a layer of this index, not synthetic data."),
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Layer of the --index. Default: the middle one.")] = None,
    runs: Annotated[
        int | None, typer.Option(help="Runs per step. Default: 20, with --end-to-end 10; CUDA: 50 and 30.")
    ] = None,
    warm: Annotated[
        bool,
        typer.Option(
            "--warm",
            help="Do not flush the CPU's or GPU's caches between runs. In a model they are cold: other "
            "layers run in between.",
        ),
    ] = False,
    end_to_end: Annotated[
        bool, typer.Option("--end-to-end", help="Time decode steps of a whole model with random weights.")
    ] = False,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FOLDER",
            help=f"Model of --end-to-end: {', '.join(CONFIGS)}, or a folder with a config.json. Default: "
            "smollm2-135m; CUDA: qwen3-8b.",
            autocompletion=names_of(lambda: CONFIGS),
        ),
    ] = None,
    distinct_layers: Annotated[
        int | None,
        typer.Option(
            help="With --end-to-end, for how many layers keys and values are generated; all layers share these in "
            "turn. Default: 2."
        ),
    ] = None,
    compiled: Annotated[
        str,
        typer.Option(
            "--compile",
            metavar="auto|on|off",
            help="With --end-to-end, compile the model's layers with torch, all but their attention, for every row of "
            "the table. auto: on a GPU.",
        ),
    ] = "auto",
    kv_dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|int8",
            help="What synthetic keys and values are stored in, and read by our steps on a GPU. auto: the --dtype. "
            "With int8 and --shared, MB counts chosen rows as if they were not.",
            autocompletion=names_of(lambda: KV_DTYPES),
        ),
    ] = AUTO,
    seed: Annotated[int, typer.Option(help="Seed of the synthetic data and of the indices.")] = 0,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Plot speed-up against context, with --shared against questions, and time against bytes.",
        ),
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    quiet: QuietOption = False,
    **parameters: Any,
) -> None:
    """Time one decode step of one layer, from the query to the output, selection included.

    Keys, values and queries are synthetic (a mixture of clusters of uneven sizes, indexed with few iterations of
    k-means), or those of a layer of an --index. The table has a row for each method at each budget.

    \b
    speed-up  Time of the fastest form of torch's dense attention in the same
              run, divided by the method's time.
    kv fraction
              What the method reads of the document's keys and values, its
              index included, as a share of all of them.
    MB        What a step must read: the selected tokens, sinks, tail, index.
    of floor  The time in which a memory copy reads that much, as a share of
              the step's time.
    error     Relative error of the output against dense attention.
    timed     graph: the step is replayed as a CUDA graph. eager: it cannot
              be, as the method waits for the GPU. wall clock: on a CPU.

    With --shared a step is of several questions, as many as --batch says, over one document, as `generate --batch-file`
    answers them: each attends to what any of them selects. Dense attention too reads the document once for all.

    With --end-to-end the steps are those of a whole model of the shape of --config, each fed with the tokens of the
    step before. They run with the fastest form of torch's dense attention, with sparsekv's dense attention, without
    attention, and with each --method (default: multipole). To fit into memory, the model's layers take turns with the
    keys and values of a few layers. With --shared too, queries of all questions get a part in common, as a trained
    model's have.

    \b
    sparsekv bench
    sparsekv bench --end-to-end --config qwen3-8b --context 128K --batch 16 --method multipole --budget 5%
    sparsekv bench --method multipole --context 128K --batch 1 --batch 16 --budget 5% --plot steps.png
    sparsekv bench --shared --batch 1 --batch 16 --index manual.skv --method codes --budget 5% --budget 1%
    sparsekv bench --method squeezed --variants --index manual.skv --layer 12 --json > steps.json
    """
    if shared and not batch:
        raise UsageError("--shared: say with --batch how many questions share a document, such as --batch 16")
    sizes = context or [], batch or [], heads, kv_heads, head_dim
    wanted = Wanted(*sizes, dtype, seed, shared, kv_dtype_named(kv_dtype))
    if end_to_end:
        elsewhere = {
            "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "index": index, "layer": layer,
            "variants": variants, "warm": warm, "csv": as_csv, "plot": plot,
        }  # fmt: skip
        what = EndToEnd(
            config, distinct_layers, wanted, method or [], budget or DEFAULT_BUDGETS, runs, device, compiled
        )
        return time_models(what, parameters, elsewhere, as_json=as_json, quiet=quiet)
    only_there = {"config": config, "distinct-layers": distinct_layers, "compile": compiled}
    for name, value in only_there.items():
        if value not in (None, "auto"):
            raise UsageError(f"--{name} {value}: means nothing without --end-to-end; leave it out")
    if as_json and as_csv:
        raise UsageError("--json and --csv exclude each other: choose one")
    refuse_unwritable_plot(plot)
    budgets = Budget.parse_each(budget or DEFAULT_BUDGETS)
    where = choose_device(device)
    resume_collector()
    times = check_runs(RUNS[where.type] if runs is None else runs)
    check_dtype(dtype)
    source = _source(index, layer, wanted, where)
    chosen = {name: methods()[name] for name in source.methods(method or [])}
    built = mixture_indexers(list(chosen), parameters, seed, source.head_dim) if isinstance(source, Mixtures) else {}
    building: dict[str, type] = {f"the index of {name}": type(one.parameters) for name, one in built.items()}
    refuse_unused(building if variants else chosen | building, parameters)
    forms = _variants if variants else partial(configured, parameters)
    # Wrong parameters are refused here, before anything is measured.
    for one in chosen.values():
        forms(one, None)
    note_small_budgets(budgets, quiet=quiet)
    note(f"timing {', '.join(chosen)}", quiet=quiet)
    timer = Timer(source, chosen, built, forms, budgets, partial(note, quiet=quiet))
    timed = timer.run(clock_for(where, times, cold=not warm))
    about = {
        "machine": machine(where),
        "torch": torch.__version__,
        "device": str(where),
        **source.about(),
        "shared": shared,
        "caches": "warm" if warm else "cold",
        "copy_bandwidth": timed.copy_bandwidth,
        "indices": {name: asdict(one.parameters) for name, one in built.items()},
        "refused": timed.refused,
    }
    if plot is not None:
        from sparsekv.cli.benchmarking.plots import plot_steps

        title = f"A decode step of one layer, {about['machine']}"
        plot_steps(timed.rows, timed.copy_bandwidth, title, plot, shared=shared)
        note(f"plot: {plot}", quiet=quiet)
    print_rows(timed.rows, about, as_json=as_json, as_csv=as_csv)
    if timed.refused:
        raise SparsekvError("; ".join(timed.refused))


def _source(index: Path | None, layer: int | None, wanted: Wanted, where: torch.device) -> Source:
    if index is not None:
        return StoredLayerSource(open_artifact(index, thorough=True), layer, wanted, where)
    if layer is not None:
        raise UsageError(f"--layer {layer}: a mixture has no other; leave it out, or give an --index")
    return Mixtures(wanted, where, list(indexers()))


def _variants(method: type[Method], record: MethodRecord | None) -> dict[str, Method]:
    return dict(method.variants(record))
