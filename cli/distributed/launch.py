"""`sparsekv --gpus N COMMAND`: N processes of one machine that run one command together, started and ended together."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from sparsekv.cli.common.commands import BY_RANKS
from sparsekv.formats.distributed.process import FOLDER, LAUNCHER, TOLD, own_place
from sparsekv.formats.errors import SparsekvError, UsageError

GRACE = 5.0  # seconds in which the other ranks may end by themselves once one has failed, or after Ctrl-C
PASSED_ON = 3.0  # seconds after which a rank that still runs is sent the Ctrl-C that only this process may have got
PAUSE = 0.05  # seconds between two looks at the ranks

Rank = subprocess.Popen[bytes]


def run_ranks(size: int, arguments: Sequence[str]) -> int:
    """Run `sparsekv ARGUMENTS` as so many ranks.

    The first rank has this process's standard files; the others print nothing but an error that none has told.

    Returns:
        0; 128 and the signal's number where a user ended it; or else the code of the rank that told of an error.

    Raises:
        SparsekvError: a rank was killed, or ended without a word.
    """
    with tempfile.TemporaryDirectory(prefix="sparsekv-ranks-") as folder, _ends() as end:
        ranks: list[Rank] = []
        try:
            # Where one cannot be started, those before it are in the list, to be stopped.
            ranks.extend(_start_rank(number, size, arguments, folder) for number in range(size))
            failed = _wait(ranks, end)
        finally:
            _stop(ranks)
        if failed is None:
            return end.code
        # Whoever told why decides the exit code: another one may have ended before it, for want of it.
        told = _told(Path(folder) / TOLD)
        code = ranks[failed if told is None else told].returncode
        if told is not None or end.code:
            return end.code or max(code, 1)
        if code == -signal.SIGPIPE:  # whoever read the output has seen enough
            return 128 + signal.SIGPIPE
    how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
    raise SparsekvError(f"rank {failed} of {size} {how}, and the others with it; run the same command again")


def _told(file: Path) -> int | None:
    """The number of the rank that told the user of an error; None where none has."""
    try:
        return int(file.read_text() or 0)
    except OSError:
        return None


def _start_rank(number: int, size: int, arguments: Sequence[str], folder: str) -> Rank:
    defaults = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size)), "GLOO_SOCKET_IFNAME": "lo"}
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name, which torch reads too
        # Keys and values grow by the chunk; in segments of fixed sizes what is freed stays with the process, unused.
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    environment = {
        **defaults,
        **os.environ,  # a user's own values count
        FOLDER: folder,
        LAUNCHER: str(os.getpid()),
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(size),
    }
    command = [sys.executable, "-m", "sparsekv.cli", *arguments]
    return subprocess.Popen(command, env=environment, stdin=None if number == 0 else subprocess.DEVNULL)


@dataclass
class _End:
    """Whether the user has asked for the end, by which exit code and when."""

    code: int = 0
    asked: float = float("inf")

    def take(self, number: int, frame: FrameType | None) -> None:
        # SIGTERM came to this process alone: it is passed on at once.
        self.code, self.asked = 128 + number, time.monotonic() if number == signal.SIGINT else -float("inf")


@contextmanager
def _ends() -> Iterator[_End]:
    """Notes Ctrl-C, which a terminal sends to the ranks as well, the first of which tells what is kept, and SIGTERM."""
    end = _End()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, end.take)
    try:
        yield end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[Rank], end: _End) -> int | None:
    """Wait for the ranks; returns the number of the first one that failed, which the others get some time to notice."""
    failed, deadline, passed_on = None, float("inf"), False
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < min(deadline, end.asked + GRACE):
        time.sleep(PAUSE)
        if end.code == 128 + signal.SIGINT and not passed_on and time.monotonic() > end.asked + PASSED_ON:
            passed_on = True
            ranks[0].send_signal(signal.SIGINT)
        if failed is None and (failed := _failed(ranks)) is not None:
            deadline = time.monotonic() + GRACE
    return _failed(ranks) if failed is None else failed


def _failed(ranks: Sequence[Rank]) -> int | None:
    """The number of a rank that failed: one that was killed before one that may have failed for want of it."""
    # Each is asked: one may have ended while an earlier one waits for it.
    codes = {number: code for number, rank in enumerate(ranks) if (code := rank.poll())}
    return min(codes, key=lambda number: codes[number], default=None)


def _stop(ranks: Sequence[Rank]) -> None:
    """End the ranks that still run: they may, at any point, without harm to an index."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    for rank in ranks:
        try:
            rank.wait(GRACE)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


MOST_ON_FEW_CORES = 8  # processes: a machine with more GPUs has more cores


def refuse_other_commands(arguments: Sequence[str]) -> None:
    """Raise UsageError if these arguments call a command that is for one process."""
    command = next((one for one in arguments if not one.startswith("-")), "")
    if command and command not in BY_RANKS:
        raise UsageError(f"{command} runs as one process; several GPUs are for {' and '.join(BY_RANKS)}")


def _start_processes(size: int | None) -> int | None:
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
        callback=_start_processes,
        is_eager=True,
        help="Split the model over N GPUs, one process each; on CPUs where there is no GPU. Only for "
        f"{' and '.join(BY_RANKS)}, and written before them: sparsekv --gpus 2 generate ...",
    ),
]
