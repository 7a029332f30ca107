"""`sparsekv --gpus N COMMAND`: start N processes (ranks) on one machine that run one command together.

A rank joins the other ranks, and refuses options that need one process. Only the first rank prints results. If one
rank fails, all ranks are ended.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from sparsekv.cli.common.commands import BY_RANKS, asks_for_help
from sparsekv.cli.common.failures import causes, end, fail
from sparsekv.formats.distributed.process import FOLDER, LAUNCHER, TOLD, Place, own_place
from sparsekv.formats.errors import SparsekvError, UsageError

GRACE = 5.0  # seconds for the other ranks to end by themselves after one has failed, or after Ctrl-C
PASSED_ON = 3.0  # seconds until SIGINT is sent to the first rank, in case only this process got Ctrl-C
PAUSE = 0.05  # seconds between two polls of the ranks

Rank = subprocess.Popen[bytes]


def run_ranks(size: int, arguments: Sequence[str]) -> int:
    """Run `sparsekv ARGUMENTS` as `size` ranks.

    The first rank uses this process's standard input and output. The other ranks print only an error that no rank has
    reported yet.

    Returns:
        0 on success. 128 plus the signal's number if the user or a closed pipe ended the run. Otherwise the exit code
            of the rank that reported an error.

    Raises:
        SparsekvError: a rank was killed, or ended without an error message.
    """
    with tempfile.TemporaryDirectory(prefix="sparsekv-ranks-") as folder, _ends() as end:
        ranks: list[Rank] = []
        try:
            # If a rank cannot be started, the list holds the ranks started before it, which are then stopped.
            ranks.extend(_start_rank(number, size, arguments, folder) for number in range(size))
            failed = _wait(ranks, end)
        finally:
            _stop(ranks)
        if failed is None:
            return end.code
        # The rank that reported the error determines the exit code.
        # Another rank may have ended earlier, but only because its connection to that rank broke.
        told = _told(Path(folder) / TOLD)
        code = ranks[failed if told is None else told].returncode
        if told is not None or end.code:
            return end.code or max(code, 1)
        if code == -signal.SIGPIPE:  # the reader closed the pipe
            return 128 + signal.SIGPIPE
    how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
    raise SparsekvError(f"rank {failed} of {size} {how}, and the other ranks were stopped; run the same command again")


def _told(file: Path) -> int | None:
    """Return the number of the rank that reported an error to the user; None if no rank has reported one."""
    try:
        return int(file.read_text() or 0)
    except OSError:
        return None


def _start_rank(number: int, size: int, arguments: Sequence[str], folder: str) -> Rank:
    defaults = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size)), "GLOO_SOCKET_IFNAME": "lo"}
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the variable's older name, which torch also reads
        # Keys and values grow chunk by chunk. In segments of fixed sizes, freed memory would stay reserved but unused.
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    environment = {
        **defaults,
        **os.environ,  # the user's own values override the defaults
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
    """The user's request to end the run: the exit code (0: no request yet), and the time of the request."""

    code: int = 0
    asked: float = float("inf")

    def take(self, number: int, frame: FrameType | None) -> None:
        # Only this process got SIGTERM, so it is passed on to the ranks at once.
        self.code, self.asked = 128 + number, time.monotonic() if number == signal.SIGINT else -float("inf")


@contextmanager
def _ends() -> Iterator[_End]:
    """Record Ctrl-C and SIGTERM within the context, unless this process ignores them.

    A terminal sends Ctrl-C also to the ranks. The first rank then reports which results are kept.
    """
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
    """Wait for the ranks, and return the number of the first rank that failed, or None.

    After a failure or Ctrl-C, ranks get `GRACE` seconds to end by themselves; after SIGTERM they get no time. So some
    ranks may still run when the function returns.
    """
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
    """Return the number of a rank that failed, or None.

    A rank that was killed by a signal is preferred, because other ranks may fail only as a consequence.
    """
    # All ranks are polled, because a rank may have ended while a rank of lower number waits for it.
    codes = {number: code for number, rank in enumerate(ranks) if (code := rank.poll())}
    return min(codes, key=lambda number: codes[number], default=None)


def _stop(ranks: Sequence[Rank]) -> None:
    """End the ranks that still run. Ending a rank never damages an index."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    for rank in ranks:
        try:
            rank.wait(GRACE)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


MOST_ON_FEW_CORES = 8  # ranks that are allowed however few cores the machine has


def refuse_other_commands(arguments: Sequence[str]) -> None:
    """Raise UsageError if these arguments call a command that runs only as one process."""
    command = next((one for one in arguments if not one.startswith("-")), "")
    if command and command not in BY_RANKS:
        raise UsageError(
            f"{command} runs as one process; several GPUs are only for {' and '.join(BY_RANKS)}: run it "
            "without --gpus or torchrun"
        )


def _start_processes(size: int | None) -> int | None:
    """Run the command as ranks, and exit with the exit code of `run_ranks`.

    Without ranks (`size` is None or 1), for help, and without a command, return `size` and do nothing else.

    Raises:
        UsageError: this process is itself a rank, the command runs only as one process, or the machine has too few
            cores.
        SparsekvError: as `run_ranks`.
    """
    if size is None or size == 1:
        return size
    place = own_place()
    if place is not None:
        raise UsageError(
            f"--gpus {size}: this is one of {place.size} processes that torchrun started; leave --gpus out"
        )
    arguments = _without_option(sys.argv[1:])
    if asks_for_help(arguments) or all(one.startswith("-") for one in arguments):
        return size
    refuse_other_commands(arguments)
    if size > (most := max(MOST_ON_FEW_CORES, cores := os.cpu_count() or 1)):
        few = f"this machine has {cores} cores, too few for so many processes"
        raise UsageError(f"--gpus {size}: {few}; give {most} at most")

    raise typer.Exit(run_ranks(size, arguments))


def _without_option(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without each `--gpus N` or `--gpus=N` before the command."""
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
        help=(
            "Split the model over N GPUs, with one process per GPU; without GPUs, over N processes on CPUs. "
            f"Only for {' and '.join(BY_RANKS)}, and given before the command's name: sparsekv --gpus 2 "
            "generate ..."
        ),
    ),
]


if TYPE_CHECKING:  # only ranks need torch.distributed
    from sparsekv.formats.distributed.group import Ranks


_PARENT_DIED = 1  # PR_SET_PDEATHSIG: prctl's option for a signal when the parent process dies
_stderr = -1


def enter(place: Place) -> None:
    """Set up this process as a rank. Output of all but the first rank is discarded.

    A rank that `--gpus` has started ends if the launcher dies.

    Raises:
        UsageError: the command runs only as one process.
    """
    global _stderr
    if place.folder is not None:
        import ctypes  # here, because --help imports this module

        ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGTERM)
        if str(os.getppid()) != os.environ.get(LAUNCHER, str(os.getppid())):  # the launcher died before prctl
            os.kill(os.getpid(), signal.SIGTERM)
    if place.number:
        _stderr = os.dup(2)
        nothing = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nothing, number)
        os.close(nothing)
    refuse_other_commands(sys.argv[1:])


def fail_as_rank(place: Place, error: BaseException, command: str, *, debug: bool) -> NoReturn:
    """End this process with the exit code of an error, and print the error if no other rank has printed one.

    The loss of another rank is not printed if `--gpus` has started the ranks, because the launcher reports it.
    """
    from sparsekv.formats.distributed.group import is_first_to_tell, is_lost_rank

    lost = is_lost_rank(list(causes(error)))
    # The launcher (`--gpus`) knows which rank exited, and reports it.
    if (lost and place.folder is not None) or not is_first_to_tell(place):
        end(int(getattr(error, "exit_code", 1)))
    if place.number:
        os.dup2(_stderr, 2)
    if lost and not debug:
        error = SparsekvError("another rank has ended or no longer answers; run the same command again")
    fail(error, command, debug=debug)


def join_ranks(device: str) -> "Ranks | None":
    """Join the other ranks, and return the group of ranks; None if there is only this process.

    Args:
        device: the value of `--device`.

    Raises:
        UsageError: `device` names another device than the ranks use.
    """
    place = own_place()
    if place is None:
        return None
    from sparsekv.formats.distributed.group import join

    ranks = join(place)
    if device not in ("auto", ranks.device.type):
        if ranks.device.type == "cpu":
            raise UsageError(f"--device {device}: no GPU is visible, so the ranks run on CPUs; leave --device out")
        raise UsageError(
            f"--device {device}: each rank takes the GPU of its own number; leave --device out, or hide the GPUs with "
            'CUDA_VISIBLE_DEVICES="" to use CPUs'
        )
    return ranks


def refuse_with_ranks(given: Mapping[str, object]) -> None:
    """Raise UsageError if the user has set one of these options, which work only in a single process.

    Only ranks call this function.

    Args:
        given: value of each option, by option; a false value for one that the user has not set.
    """
    for option, value in given.items():
        if value:
            raise UsageError(
                f"{option} does not work with several ranks; leave it out, or use neither --gpus nor torchrun"
            )
