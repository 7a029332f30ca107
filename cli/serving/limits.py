"""Checks of a request before it is parsed: host, key, and size and time of the body."""

import asyncio
import hmac
import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sparsekv.cli.serving.errors import ApiError
from sparsekv.formats.errors import UsageError, reason_of

BODY_SECONDS = 30.0
"""Seconds within which a request's body must arrive."""
DISCARDED = 16
"""Multiple of the maximum size up to which a body that is too large is read and discarded.

A client that still sends its body would otherwise not get the error.
"""
OPEN_PATHS = ("/health",)
"""Paths that need no key."""
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]]+)(:[0-9]{1,5})?")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def read_keys(file: Path) -> list[str]:
    """Return the keys in a file, one per line. A line that begins with `#` is a comment.

    Raises:
        UsageError: the file cannot be read or has no key, or a key has a space or a character other than printable
            ASCII.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {file} cannot be read: {reason_of(error)}; name a file of text") from None
    keys = {number: key for number, line in enumerate(lines, 1) if (key := line.strip()) and not key.startswith("#")}
    if not keys:
        raise UsageError(f"--api-key-file {file} has no key; write one per line")
    for number, key in keys.items():
        if not key.isascii() or not key.replace(" ", "").isprintable():
            told = "the key has characters that no header can carry; use printable ASCII"
            raise UsageError(f"--api-key-file {file}, line {number}: {told}")
        if " " in key:
            raise UsageError(f"--api-key-file {file}, line {number}: the key has a space; write one key per line")
    return list(keys.values())


def refuse_no_origin(given: str) -> None:
    """Raise UsageError unless a value of --cors is `*` or an origin (SCHEME://HOST[:PORT])."""
    if given != "*" and not ORIGIN.fullmatch(given):
        told = (
            "is not an origin; give SCHEME://HOST[:PORT] as a browser sends it, such as https://chat.example.org, or *"
        )
        raise UsageError(f"--cors {given} {told}")


class Gate:
    """An ASGI app in front of another app. Refuses requests with a wrong host name or without a valid key.

    OPEN_PATHS and OPTIONS requests need no key.

    The check of hosts protects a server on loopback from web pages whose host name is resolved to 127.0.0.1 (DNS
    rebinding): requests of such a page have the page's host name.

    Args:
        keys: valid keys; empty: requests need no key.
        hosts: valid host names of requests; empty: all.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], hosts: Sequence[str]):
        self.app, self.hosts = app, hosts
        # All hashes have the same length, so the time of a comparison does not depend on the length of a key.
        self.keys = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["path"], scope["method"], Headers(scope=scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, path: str, method: str, headers: Headers) -> None:
        """Raise ApiError for a request with a wrong host (421), or without a key that it needs (401)."""
        if self.hosts and host_name(headers.get("host", "")) not in self.hosts:
            told = f"this server answers requests to {', '.join(self.hosts)} only; the Host header names another host"
            raise ApiError(421, told, code="wrong_host")
        # A browser first sends an OPTIONS request without a key (CORS preflight).
        if self.keys and path not in OPEN_PATHS and method != "OPTIONS":
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not self._is_known(key.strip()):
                told = "this server requires a key: send the header Authorization: Bearer KEY"
                raise ApiError(401, told, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _is_known(self, key: str) -> bool:
        """Whether a key is valid. The key is compared with all valid keys, each in constant time."""
        given = sha256(key.encode()).digest()
        return sum(hmac.compare_digest(given, one) for one in self.keys) > 0


def host_name(header: str) -> str:
    """Return the name in a Host header in lower case, without the port and without the brackets of IPv6."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


async def read_body(request: Request, limit: int) -> bytes:
    """Return a request's body.

    Raises:
        ApiError: the body is not sent as JSON (415), has more than `limit` bytes (413), or does not arrive in time
            (408).
        ClientDisconnect: the client has disconnected.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Browsers let a page of another site send a form or plain text without a preflight, but not JSON.
        raise ApiError(415, "send the body as JSON, with the header Content-Type: application/json")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _limited(request, limit)
    except TimeoutError:
        told = f"the body did not arrive within {BODY_SECONDS:.0f} s"
        raise ApiError(408, told, headers={"Connection": "close"}) from None


async def _limited(request: Request, limit: int) -> bytes:
    body, seen = bytearray(), 0
    async for part in request.stream():
        seen += len(part)
        if seen <= limit:
            body += part
        elif seen > DISCARDED * limit:
            break
    if seen > limit:
        told = f"the body is larger than {limit:,} bytes; ask a shorter question"
        raise ApiError(413, told, code="body_too_large", headers={"Connection": "close"})
    return bytes(body)
