"""The lock of an index's folder: whoever changes what is in it holds it."""

from pathlib import Path

from filelock import FileLock, Timeout

from sparsekv.formats.errors import ArtifactError

LOCK = ".lock"


def acquire_lock(folder: Path) -> FileLock:
    """Take the lock of a folder that exists; the caller releases it.

    Raises:
        ArtifactError: another process holds it.
        OSError: the folder cannot be written, or a link lies in the lock's place.
    """
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ArtifactError(f"{folder} is being built by another process; wait for it or stop it") from None
    return lock
