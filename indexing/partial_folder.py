"""A folder that appears under its name only when it is whole; what a killed process left of one is cleared away.

Its process holds a lock in it, which ends with the process however that ends. So whoever can take the lock of a partial
folder may remove it, and no one removes that of a process that lives.
"""

import contextlib
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from sparsekv.formats.sync import sync_path

OWNER = ".owner"


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder`, but for its lock, that takes this name at the end, and only if all went well.

    Partial folders of the same name whose processes are dead are removed first.

    Raises:
        OSError: it cannot be made, or something else has the name.
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
        # Until the lock is held another process may take this folder for a dead one's: then it is gone, or about to be.
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
        unfinished.rmdir()  # fails on anything but an empty one, whose process died before it had the lock


def _remove(unfinished: Path) -> None:
    """The lock last: if this is interrupted too, the rest can still be told for a dead process's."""
    for path in unfinished.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != OWNER:
            path.unlink()
    shutil.rmtree(unfinished)
