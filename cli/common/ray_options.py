"""`--ray` and `--workers`: of commands whose work a Ray cluster can do."""

from typing import Annotated

import typer

from sparsekv.formats.errors import UsageError

RayOption = Annotated[
    str | None,
    typer.Option(
        metavar="local|auto|HOST:PORT",
        help="Let workers of a Ray cluster do it, each with a model of its own and one document at a time: a cluster "
        "started on this machine (local), the one that this machine belongs to (auto), or one by its address. Needs "
        "Ray.",
        rich_help_panel="Many documents",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Workers of --ray. Default: one a GPU, or without GPUs one for four CPUs.",
        rich_help_panel="Many documents",
    ),
]


def refuse_workers_alone(workers: int | None, ray: str | None) -> None:
    """Raise UsageError for a number of workers where no cluster has them."""
    if workers is not None and ray is None:
        raise UsageError(f"--workers {workers}: is for --ray; leave it out")
