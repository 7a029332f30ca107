"""Path of the Unix socket of the user's server. The socket never replaces another program's file."""

import os
import socket
import stat
import struct
from contextlib import suppress

from sparsekv.formats.errors import UsageError

VARIABLE = "SPARSEKV_SERVER"
"""Environment variable with the path of the socket. `off`: commands use no server."""
OFF = "off"
REMEDY = f"name another place in {VARIABLE}"


def socket_path() -> str | None:
    """Return the path of the server's socket; None if the user has turned servers off.

    The path is that of SPARSEKV_SERVER, which may be relative. By default the socket is below $XDG_RUNTIME_DIR, or
    below the user's cache folder if that variable is not an absolute path of a folder.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return None if named == OFF else os.path.expanduser(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.path.isdir(runtime):
        return f"{runtime}/sparsekv/server"
    from sparsekv.formats.user.cache import cache_root  # only needed without XDG_RUNTIME_DIR, which is mostly set

    return f"{cache_root()}/server/socket"


def is_own_socket(path: str) -> bool:
    """Whether the file at a path is a socket of this user."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


def is_own_peer(connection: socket.socket) -> bool:
    """Whether the process at the other end of a connection is this user's."""
    form = "3i"
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(form))
    _, user, _ = struct.unpack(form, found)
    return bool(user == os.geteuid())


def refuse_occupied(path: str) -> None:
    """Raise UsageError if a path exists and is not a socket of this user. Symbolic links are not followed."""
    if os.path.lexists(path) and not is_own_socket(path):
        raise UsageError(f"{path}: this is not a socket of yours, and a server would have to replace it; {REMEDY}")


def refuse_missing_folder(path: str) -> None:
    """Raise UsageError if the user has named a socket in a folder that does not exist."""
    folder = os.path.dirname(path)
    if os.environ.get(VARIABLE) and not os.path.isdir(folder):
        raise UsageError(f"{path}: there is no folder {folder}; create it, or {REMEDY}")


def refuse_listener(path: str) -> None:
    """Raise UsageError if a program listens at a path.

    Call this function with the server's lock held: the program is then not a server of sparsekv.
    """
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(path)
        raise UsageError(f"{path}: another program listens there; {REMEDY}")


def remove_own_socket(path: str) -> None:
    """Remove a socket of this user; leave anything else."""
    if is_own_socket(path):
        os.unlink(path)
