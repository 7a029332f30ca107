"""Requests from a stranger: each is answered or refused in the API's form, and no file is touched."""

from pathlib import Path

from support.hostile_requests import send
from support.serving import Server

COUNT = 100


def test_random_requests_are_answered_or_refused(server: Server, indices: Path) -> None:
    def files() -> list[tuple[Path, int]]:
        return sorted((path, path.stat().st_mtime_ns) for path in indices.rglob("*"))

    before = files()
    statuses = send(server.url.removesuffix("/v1"), 0, COUNT)
    assert sum(statuses.values()) == COUNT
    assert statuses[200] > COUNT // 20
    assert statuses[400] > COUNT // 4
    assert files() == before
