"""The HTTP server: its address, the signals that end it, and timeouts of connections."""

import asyncio
import errno
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sparsekv.cli.common.console import note
from sparsekv.cli.serving.app import Api
from sparsekv.formats.errors import SparsekvError, UsageError, reason_of

HEAD_SECONDS = 30.0
"""Seconds within which an idle connection must send the head of its next request. Otherwise it is closed."""
LAST_SECONDS = 5
"""Seconds that clients have, after the last answer has ended, to read the rest of the responses."""
UNREAD = 1 << 16
"""Size in bytes of a socket's send buffer. The kernel allocates twice this size."""
NO_MORE = "no new requests; accepted requests are completed; another signal ends them"
FILES = 65_536
"""Wanted limit of open files. Each connection is an open file."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address and does not listen yet.

    Raises:
        UsageError: there is no such address on this machine.
        SparsekvError: the port is taken, or may not be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise UsageError(f"--host {host}: there is no such address; give 127.0.0.1, or one of this machine's") from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        told = f"cannot listen on {host} port {port}: {reason_of(error)}"
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(
                f"--host {host} is not an address of this machine; give 127.0.0.1, or one of this machine's addresses"
            ) from None
        raise SparsekvError(f"{told}; give another --port (0: any that is free) or --host") from None
    return listening


def address_of(listening: socket.socket, host: str) -> str:
    """Return the URL of a bound socket. `host` is the value of `--host`."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}"


class _Connection(H11Protocol):
    """A connection that is closed if the head of a request does not come in time, or if its client reads nothing.

    Args:
        unread: seconds after which the connection is closed if the client does not read the sent data.
        arguments: arguments of the base class.
    """

    def __init__(self, *, unread: float, **arguments: Any):
        super().__init__(**arguments)
        self.unread = unread

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Otherwise the kernel would buffer megabytes of unread data.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
        self.head_timer: asyncio.TimerHandle | None = None
        self.read_timer: asyncio.TimerHandle | None = None
        self._time_head()

    def pause_writing(self) -> None:
        """Start the timer of unread data. This method is called when the buffers are full."""
        super().pause_writing()
        self.read_timer = self.loop.call_later(self.unread, self.transport.abort)

    def resume_writing(self) -> None:
        _stop(self.read_timer)
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self.head_timer)
        _stop(self.read_timer)
        super().connection_lost(exc)

    def _time_head(self) -> None:
        """Start the head timer if the connection waits for a request; stop the timer if a head has come."""
        if self.conn.their_state is not h11.IDLE:
            _stop(self.head_timer)
            self.head_timer = None
        elif self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    """Stop a timer, if there is one."""
    if timer is not None:
        timer.cancel()


class Server(uvicorn.Server):
    """A server that completes running answers before it ends.

    On SIGTERM or Ctrl-C the server refuses new requests for answers. It ends when the running answers have ended, or
    after `drain` seconds. A second signal ends the running answers, each with an error. A third signal ends the server
    at once.

    Args:
        unread: seconds after which a connection is closed if its client does not read the sent data.
        ready: called when the server listens.
    """

    def __init__(self, api: Api, drain: float, unread: float, ready: Callable[[], None], *, quiet: bool):
        config = uvicorn.Config(
            api.app(),
            http=partial(_Connection, unread=unread),  # type: ignore[arg-type]  # it is only called
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the app prints its errors itself
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=LAST_SECONDS,
        )
        super().__init__(config)
        self.api, self.drain, self.ready, self.quiet = api, drain, ready, quiet
        self._by_keyboard, self._all_completed = False, True
        self._closing: list[Thread] = []

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended answers that were not complete."""
        return self._by_keyboard and not self._all_completed

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets)
        if self.force_exit:
            self._all_completed = False
        else:
            for one in self._closing:
                one.join()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._by_keyboard |= sig == signal.SIGINT
        if len(self._closing) > 1:
            self.force_exit = self.should_exit = True
            return
        told = "answers are ended" if self.api.draining else NO_MORE
        seconds = 0.0 if self.api.draining else self.drain
        self.api.draining = True
        self._closing.append(Thread(target=self._close, args=(told, seconds), daemon=True))
        self._closing[-1].start()

    def _close(self, told: str, seconds: float) -> None:
        note(told, quiet=self.quiet)
        if not self.api.scheduler.close(seconds):
            self._all_completed = False
        self.should_exit = True


def allow_many_connections() -> None:
    """Raise the limit of open files to `FILES`, or to the hard limit if that is lower. A higher limit stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
