"""What was typed in earlier chats, kept in the user's cache folder for the arrow keys."""

import json
import os
from contextlib import suppress
from pathlib import Path

from sparsekv.formats.user_cache import cache_root, read_small

MOST = 1000
"""Entries that are offered; a file of twice as many is cut down to them."""


class History:
    """A file with a line of JSON for each entry, so that one of several lines stays one; for the user's eyes alone.

    A file that cannot be read is an empty one, and what cannot be written is left out: nothing is raised.
    """

    def __init__(self, file: Path | None = None):
        self.file = cache_root() / "chat-history.jsonl" if file is None else file

    def entries(self) -> list[str]:
        """The last entries, oldest first."""
        lines = read_small(self.file).splitlines()
        found = [entry for line in lines if isinstance(entry := _parsed(line), str)][-MOST:]
        if len(lines) > 2 * MOST:
            self._write(found, os.O_TRUNC)
        return found

    def add(self, entry: str) -> None:
        """Write one more entry to the end of the file."""
        self._write([entry], os.O_APPEND)

    def _write(self, entries: list[str], how: int) -> None:
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            # Never waits for the reader of a pipe that lies there.
            descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | how, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.writelines(f"{json.dumps(entry)}\n" for entry in entries)


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
