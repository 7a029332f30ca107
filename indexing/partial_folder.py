"""Create a folder atomically: it gets its name only when complete, and leftovers of killed processes are removed.

A process holds a lock in its partial folder; the system releases the lock when the process ends, however it ends. So
whoever can take the lock may remove the folder, and nobody removes the folder of a live process.
"""

import contextlib
import errno
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.sync import sync_path

OWNER = ".owner"


def cannot_write(folder: Path, error: OSError) -> ArtifactError:
    """What to raise where a folder could not be written, with what the user can do."""
    reason = (error.strerror or str(error)).lower()
    taken = error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
    remedy = "choose another name" if taken else "choose another name, or make room there"
    return ArtifactError(f"cannot write {folder}: {reason}; {remedy}")


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder beside `folder`, empty but for its lock; on success it is renamed to `folder`, else removed.

    Partial folders of the same name whose processes are dead are removed first.

    Raises:
        OSError: the folder cannot be made, or the name is taken.
    """
    _remove_dead(folder)
    unfinished, lock = _own(folder)
    try:
        yield unfinished
        unfinished.rename(folder)
        (folder / OWNER).unlink()
        sync_path(folder.absolute().parent)
    finally:
        with contextlib.suppress(OSError):
            _remove(unfinished)
        lock.release()


def _own(folder: Path) -> tuple[Path, FileLock]:
    while True:
        unfinished = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.partial")
        unfinished.mkdir(parents=True)
        lock = FileLock(unfinished / OWNER)
        # Before the lock is held, another process may treat this folder as a dead one's and remove it: try again then.
        with contextlib.suppress(FileNotFoundError, FileExistsError, Timeout):
            lock.acquire(timeout=0)
            if (unfinished / OWNER).exists():
                return unfinished, lock
            lock.release()


def _remove_dead(folder: Path) -> None:
    name = re.compile(rf"{re.escape(folder.name)}\.[0-9a-f]{{8}}\.partial")
    siblings = list(folder.parent.iterdir()) if folder.parent.is_dir() else []
    for path in siblings:
        if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError, Timeout):
                _remove_if_dead(path)


def _remove_if_dead(unfinished: Path) -> None:
    if (unfinished / OWNER).exists():
        with FileLock(unfinished / OWNER).acquire(timeout=0):
            _remove(unfinished)
    else:
        unfinished.rmdir()  # only works on an empty folder: its process died before it had the lock


def _remove(unfinished: Path) -> None:
    """Remove a folder, the lock last: if this is interrupted, the next process can still see that the owner is dead."""
    for path in unfinished.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != OWNER:
            path.unlink()
    shutil.rmtree(unfinished)
