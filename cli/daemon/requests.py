"""Requests to a server: return its status, or end."""

import os
import select
import socket
from contextlib import suppress
from typing import Any

from sparsekv.cli.daemon.address import is_own_peer, is_own_socket
from sparsekv.cli.daemon.messages import receive, send
from sparsekv.formats.errors import SparsekvError

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
