"""Messages between a command's process and the server: JSON behind its length, with file descriptors beside it."""

import json
import socket
import struct
from typing import Any

SERVE = "--serve-commands"
"""Argument by which `start` calls the program as the server."""
ACCEPTED, REFUSED = b"A", b"R"
"""Answers to a request. A message with the reason follows REFUSED."""
STOPPED, ENDED, KILLED = b"S", b"E", b"K"
"""Messages about a command that has begun. A byte with the exit code or the signal follows."""
GO = b"G"
"""The answer to ACCEPTED, after which the command begins."""
TO_ALL = 0x80
"""Added to a signal's number that the terminal sends to all processes of a command."""
_HEAD = struct.Struct("=Q")
MOST = 16 << 20  # bytes of a message: arguments and environment take 6 MiB at most by default
MOST_DESCRIPTORS = 200  # the kernel passes 253 at once
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
        ValueError: there is no message, or it is no object in JSON.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _HEAD.size, MOST_DESCRIPTORS)
    if len(head) != _HEAD.size or (size := _HEAD.unpack(head)[0]) > MOST:
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
