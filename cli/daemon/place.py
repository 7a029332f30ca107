"""Refuse a path for the server's socket where the socket would replace something else."""

import os
import socket
from contextlib import suppress

from sparsekv.cli.daemon.address import VARIABLE, is_own_socket
from sparsekv.formats.errors import UsageError

REMEDY = f"name another place in {VARIABLE}"


def refuse_occupied(path: str) -> None:
    """Raise UsageError if there is anything at a path but a socket of this user. A link is not followed."""
    if os.path.lexists(path) and not is_own_socket(path):
        raise UsageError(f"{path}: this is no socket of yours, and would be replaced; {REMEDY}")


def refuse_missing_folder(path: str) -> None:
    """Raise UsageError if the user has named a socket in a folder that does not exist."""
    folder = os.path.dirname(path)
    if os.environ.get(VARIABLE) and not os.path.isdir(folder):
        raise UsageError(f"{path}: there is no folder {folder}; make it, or {REMEDY}")


def refuse_listener(path: str) -> None:
    """Raise UsageError if a program listens at a path. It is another program's, if no server holds the lock."""
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(path)
        raise UsageError(f"{path}: another program listens there; {REMEDY}")


def remove_own_socket(path: str) -> None:
    """Remove a socket of this user; leave anything else."""
    if is_own_socket(path):
        os.unlink(path)
