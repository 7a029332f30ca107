"""Forcing what was written to disk, so that a crash cannot take it back."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def sync_path(path: Path) -> None:
    """fsync a file, or a folder after a file in it was created or renamed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(target: Path, data: Iterable[bytes | memoryview]) -> None:
    """Write a file, its bytes given in pieces, so that it is there whole or as it was before, whatever happens; makes
    its folder when missing.

    Raises:
        OSError: it could not be written; nothing is left of the attempt.
    """
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        target.parent.mkdir(exist_ok=True)
        with temporary.open("wb") as file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        sync_path(target.parent)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
