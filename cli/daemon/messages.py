"""Messages between client and server, and the Unix socket over which they are sent.

A message is its length in 8 bytes, then JSON. File descriptors are sent with the length. The socket never replaces
another program's file. `status` and `stop` are requests without a command.
"""

import json
import os
import select
import socket
import stat
import struct
from contextlib import suppress
from typing import Any

from sparsekv.formats.errors import SparsekvError, UsageError

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


SERVE = "--serve-commands"
"""Argument with which `start` runs this program as the server."""
ACCEPTED, REFUSED = b"A", b"R"
"""Answers of the server to a request."""
STOPPED, ENDED, KILLED = b"S", b"E", b"K"
"""Messages of the server when a command was stopped, ended, or was killed. A byte with the signal or the exit code
follows."""
GO = b"G"
"""Answer of the client to ACCEPTED. The command then begins."""
TO_ALL = 0x80
"""Bit that the client sets in a signal's number if a terminal sends this signal to all processes of a command."""
_HEAD = struct.Struct("=Q")
MOST_MESSAGE_BYTES = 16 << 20  # by default the kernel limits arguments and environment to 6 MiB
MOST_DESCRIPTORS = 200  # maximum number of descriptors in a message; the kernel's limit is 253
MOST_NUMBER = 300
"""The highest number of a descriptor that a command may have open when it begins."""


def send(connection: socket.socket, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
    """Send a message. Raises OSError if the other end is gone."""
    text = json.dumps(message).encode()
    socket.send_fds(connection, [_HEAD.pack(len(text))], descriptors or [])
    connection.sendall(text)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive a message and its descriptors.

    Raises:
        OSError: the connection broke.
        ValueError: the message is incomplete, too long, or not a JSON object.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _HEAD.size, MOST_DESCRIPTORS)
    if len(head) != _HEAD.size or (size := _HEAD.unpack(head)[0]) > MOST_MESSAGE_BYTES:
        raise ValueError("no message")
    text = bytearray()
    while len(text) < size:
        part = connection.recv(size - len(text))
        if not part:
            raise ValueError("half a message")
        text += part
    message = json.loads(text)
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message, descriptors


PATIENCE = 10.0  # seconds to wait for a server's answer, and for its end


def status(path: str) -> dict[str, Any] | None:
    """Return the status of the server at a path; None if no server of this user answers there."""
    return _answer(path, "status")


def stop(path: str) -> bool:
    """End the server at a path; commands that it runs go on. Returns whether a server answered.

    Raises:
        SparsekvError: the server does not end.
    """
    found = status(path)
    if found is None:
        return False
    with suppress(ProcessLookupError):
        ended = os.pidfd_open(found["pid"])
        try:
            _answer(path, "stop")
            if not select.select([ended], [], [], PATIENCE)[0]:
                raise SparsekvError(
                    f"the server (process {found['pid']}) does not end; end it with `kill -9 {found['pid']}`"
                )
        finally:
            os.close(ended)
    return True


def _answer(path: str, operation: str) -> dict[str, Any] | None:
    if not is_own_socket(path):
        return None
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError, ValueError):
        connection.settimeout(PATIENCE)
        connection.connect(path)
        if is_own_peer(connection):
            send(connection, {"operation": operation})
            return receive(connection)[0]
    return None
