"""The lock of an index's folder, held by any process that changes its contents."""

from pathlib import Path

from filelock import FileLock, Timeout

from sparsekv.formats.errors import ArtifactError

LOCK = ".lock"


def acquire_lock(folder: Path) -> FileLock:
    """Acquire the lock of an existing folder; the caller releases it.

    Raises:
        ArtifactError: another process holds it.
        OSError: the folder cannot be written, or the lock file is a link.
    """
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ArtifactError(f"{folder} is being built by another process; wait for it or stop it") from None
    return lock
