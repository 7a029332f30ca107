"""Client of the user's server: if a server may run the command of this process, a fork of the server runs it."""

import os
import sys

from sparsekv.cli.daemon.messages import is_own_socket, socket_path

ELSEWHERE = ("start", "stop", "models", "completion", "config")
"""Commands that never run in the server."""
APART = ("--gpus", "--ray", "--debug")
"""Prefixes of options that keep a command out of the server. With them a command starts other processes, or shows all
output of imported libraries."""
OF_RANKS = ("SPARSEKV_RANKS", "TORCHELASTIC_RUN_ID")


def hand_over() -> None:
    """Run this process's command in a fork of the server, and end as the command ends.

    Returns without reading or printing anything if there is no server that may run the command.
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
