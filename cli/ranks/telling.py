"""Which rank speaks: the first prints all output, and whichever fails first tells the one error of all."""

import ctypes
import os
import signal
import sys
from typing import NoReturn

from sparsekv.cli.common.ending import end, fail
from sparsekv.cli.common.failures import causes
from sparsekv.cli.ranks.option import refuse_other_commands
from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.ranks.place import LAUNCHER, Place

_PARENT_DIED = 1  # PR_SET_PDEATHSIG of prctl
_stderr = -1


def enter(place: Place) -> None:
    """Begin as a rank: end with the process that started it, and print nothing unless it is the first.

    Raises:
        UsageError: the command is for one process.
    """
    global _stderr
    if place.folder is not None:
        ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGTERM)
        if str(os.getppid()) != os.environ.get(LAUNCHER, str(os.getppid())):  # it died before that call
            os.kill(os.getpid(), signal.SIGTERM)
    if place.number:
        _stderr = os.dup(2)
        nothing = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nothing, number)
        os.close(nothing)
    refuse_other_commands(sys.argv[1:])


def fail_as_rank(place: Place, error: BaseException, command: str, *, debug: bool) -> NoReturn:
    """End with an error, and tell it if no other rank has told one."""
    from sparsekv.formats.ranks.ranks import is_first_to_tell, is_lost_rank

    lost = is_lost_rank(list(causes(error)))
    # Who started the ranks by --gpus knows which of them has ended, and tells that.
    if (lost and place.folder is not None) or not is_first_to_tell(place):
        end(int(getattr(error, "exit_code", 1)))
    if place.number:
        os.dup2(_stderr, 2)
    if lost and not debug:
        error = SparsekvError("another rank has ended or no longer answers; run the same command again")
    fail(error, command, debug=debug)
