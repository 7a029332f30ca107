"""The option `--gpus`, which starts ranks, and which commands can be run by them."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from sparsekv.cli.common.commands import BY_RANKS
from sparsekv.formats.errors import UsageError
from sparsekv.formats.ranks.place import own_place

MOST_ON_FEW_CORES = 8  # processes: a machine with more GPUs has more cores


def refuse_other_commands(arguments: Sequence[str]) -> None:
    """Raise UsageError if these arguments call a command that is for one process."""
    command = next((one for one in arguments if not one.startswith("-")), "")
    if command and command not in BY_RANKS:
        raise UsageError(f"{command} runs as one process; several GPUs are for {' and '.join(BY_RANKS)}")


def _start(size: int | None) -> int | None:
    """Run the command as ranks and exit with their code, unless it is to be one process, or to print its help."""
    if size is None or size == 1:
        return size
    place = own_place()
    if place is not None:
        raise UsageError(f"--gpus {size}: this is one of {place.size} processes that torchrun started; leave it out")
    arguments = _without_option(sys.argv[1:])
    if {"--help", "-h"} & set(arguments) or all(one.startswith("-") for one in arguments):
        return size
    refuse_other_commands(arguments)
    if size > (most := max(MOST_ON_FEW_CORES, cores := os.cpu_count() or 1)):
        few = f"this machine has {cores} cores, too few for so many processes"
        raise UsageError(f"--gpus {size}: {few}; give {most} at most")
    from sparsekv.cli.ranks.launch import run_ranks

    raise typer.Exit(run_ranks(size, arguments))


def _without_option(arguments: Sequence[str]) -> list[str]:
    """The arguments without each `--gpus N` or `--gpus=N` before the command; the last of them counts."""
    command = next((number for number, one in enumerate(arguments) if one in BY_RANKS), len(arguments))
    before, left = iter(arguments[:command]), list[str]()
    for one in before:
        if one == "--gpus":
            next(before, None)
        elif not one.startswith("--gpus="):
            left.append(one)
    return [*left, *arguments[command:]]


GpusOption = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        metavar="N",
        min=1,
        callback=_start,
        is_eager=True,
        help="Split the model over so many GPUs, by a process for each; on CPUs where there is no GPU. It stands "
        f"before the command, {' or '.join(BY_RANKS)}.",
    ),
]
