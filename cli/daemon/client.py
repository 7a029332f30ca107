"""Let the user's server run this process's command, if there is one; this process passes signals on and waits."""

import os
import sys

from sparsekv.cli.daemon.address import is_own_socket, socket_path

ELSEWHERE = ("start", "stop", "models", "completion", "config")
"""Commands that need no server, or are about it."""
APART = ("--gpus", "--ray", "--debug")
"""Beginnings of options by which a command starts other processes, or shows all that libraries print at import."""
OF_RANKS = ("SPARSEKV_RANKS", "TORCHELASTIC_RUN_ID")


def hand_over() -> None:
    """Run this process's command in a fork of the server, and end as the command ends.

    Returns if there is no server that may run it. Then nothing has been read or printed.
    """
    path = socket_path() if _may_be_handed_over() else None
    if path is None or not is_own_socket(path):
        return
    from sparsekv.cli.daemon.waiting import run_by  # imported here, because most commands have no server

    run_by(path)


def _may_be_handed_over() -> bool:
    given = sys.argv[1:]
    from sparsekv.cli.common.commands import COMMANDS

    command = next((one for one in given if not one.startswith("-")), None)
    if command not in COMMANDS or command in ELSEWHERE or any(one.startswith(APART) for one in given):
        return False
    return not any(name in os.environ for name in OF_RANKS)
