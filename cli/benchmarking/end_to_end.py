"""`sparsekv bench --end-to-end`: tokens a second of a whole model, dense and with methods."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.table import Table

from sparsekv.cli.benchmarking.indexers import mixture_indexers
from sparsekv.cli.common.console import note, say, show
from sparsekv.cli.common.small_budgets import note_small_budgets
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.indexing.indexers.registry import indexers
from sparsekv.runtime.benchmark.end_to_end import ModelRow
from sparsekv.runtime.benchmark.model_timer import EndToEnd, ModelTimer
from sparsekv.runtime.selection.budget import Budget


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
        if value is not None and value is not False:  # 0 is a layer's number
            raise UsageError(f"--{name.replace('_', '-')}: means nothing with --end-to-end; leave it out")
    building = partial(mixture_indexers, parameters=parameters, seed=what.wanted.seed)
    timer = ModelTimer(what, parameters, list(indexers()), building, partial(note, quiet=quiet))
    note_small_budgets(timer.budgets, quiet=quiet)
    rows = timer.run()
    about = timer.about()
    if as_json:
        say(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        _print(rows, about)
    if timer.refused:
        raise SparsekvError("; ".join(timer.refused))


def _print(rows: list[ModelRow], about: dict[str, Any]) -> None:
    compiled, shared = (
        ", compiled" if about["compiled"] else "",
        "a batch over one document, " if about["shared"] else "",
    )
    table = Table(
        title=f"{about['config']}, random weights, {about['layers']} layers that take turns with the keys and values "
        f"of {about['distinct_layers']}, {about['dtype']}{compiled}, {shared}{about['machine']}",
        title_justify="left",
        title_style="",
    )
    table.add_column("method")
    for name in ("context", "batch", "budget", "ms a step [quartiles]", "tokens/s", "speed-up", "kv fraction", "timed"):
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
