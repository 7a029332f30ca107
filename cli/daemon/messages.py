"""Messages between client and server: the length in 8 bytes, then JSON. File descriptors are sent with the length."""

import json
import socket
import struct
from typing import Any

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
"""Bit that is set in the number of a signal if the terminal sends the signal to all processes of a command."""
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
