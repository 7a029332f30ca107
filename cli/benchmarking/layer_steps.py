"""Time a decode step of one layer with the options of `bench`, and print the table."""

from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from sparsekv.cli.benchmarking.options import DEFAULT_BUDGETS, BenchOptions
from sparsekv.cli.benchmarking.output import mixture_indexers, print_rows
from sparsekv.cli.common.console import note
from sparsekv.cli.common.method_options import note_budgets
from sparsekv.cli.common.open_artifact import open_artifact
from sparsekv.cli.common.process import resume_collector
from sparsekv.cli.configuring.sources import on_command_line
from sparsekv.formats.device import choose_device
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.models.load import check_dtype
from sparsekv.indexing.indexers.interface import indexers
from sparsekv.runtime.benchmark.clock import clock_for
from sparsekv.runtime.benchmark.layer_timer import Forms, Timed, Timer, check_runs, configured, machine
from sparsekv.runtime.benchmark.sources import Mixtures, Source, StoredLayerSource
from sparsekv.runtime.selection.interface import Budget, methods
from sparsekv.runtime.selection.registry import refuse_unused

RUNS = {"cpu": 20, "cuda": 50}


def run(options: BenchOptions) -> None:
    """Time the steps, print the table, and write the plot if there is to be one.

    Raises:
        UsageError: a value of an option is not valid, a method does not exist, or no chosen method reads an option.
        SparsekvError: an error of `open_artifact`, or steps that could not be timed.
    """
    where = choose_device(options.run.device)
    resume_collector()
    runs = check_runs(RUNS[where.type] if options.runs is None else options.runs)
    timer = _timer(options, where)
    note_budgets(timer.budgets, quiet=options.run.quiet)
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
