"""`--ray` and `--workers`: of commands whose work a Ray cluster can do."""

import re
from typing import Annotated

import typer

from sparsekv.formats.errors import UsageError

LOCAL, AUTO = "local", "auto"
RayOption = Annotated[
    str | None,
    typer.Option(
        metavar="local|auto|HOST:PORT",
        help="Let workers of a Ray cluster do it, each with a model of its own and one document (of eval: one context) "
        "at a time: a cluster started on this machine (local), the one that this machine belongs to (auto), or one by "
        "its address. Needs pip install 'sparsekv[ray]'.",
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


def check_ray(ray: str | None, workers: int | None) -> None:
    """Raise UsageError for what is no address of a cluster, or a number of workers where no cluster has them."""
    if workers is not None and ray is None:
        raise UsageError(f"--workers {workers} is for --ray; leave it out")
    if ray is not None and ray not in (LOCAL, AUTO) and not re.fullmatch(r"(ray://)?[^\s/]+:\d{1,5}", ray):
        raise UsageError(f"--ray {ray}: give {LOCAL}, {AUTO} or HOST:PORT")
