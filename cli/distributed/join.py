"""One process (rank) of a distributed command. A rank joins the other ranks, and refuses options that need one process.

Only the first rank prints results.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from sparsekv.cli.common.failures import causes, end, fail
from sparsekv.cli.distributed.launch import refuse_other_commands
from sparsekv.formats.distributed.process import LAUNCHER, Place, own_place
from sparsekv.formats.errors import SparsekvError, UsageError

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
    """Raise UsageError for the first of these options, given with their values, that the user has set.

    Only ranks call this function. The options work only in a single process.
    """
    for option, value in given.items():
        if value:
            raise UsageError(
                f"{option} does not work with several ranks; leave it out, or use neither --gpus nor torchrun"
            )
