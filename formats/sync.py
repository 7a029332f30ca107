"""Flushes writes to disk, so that they survive a crash."""

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """fsync a file, or a folder after a file in it was created or renamed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
