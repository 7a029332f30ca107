"""Cache of models that a server loads before it forks. A fork uses such a model if the model's files are unchanged."""

from collections.abc import Hashable
from pathlib import Path
from typing import Generic, TypeVar

Model = TypeVar("Model")
Files = tuple[tuple[str, int, int, int, int], ...]
"""Name, inode, size in bytes, modification time and change time in nanoseconds of each file."""


def files_of(folder: Path) -> Files:
    """Return the state of the files in a folder and directly in its subfolders; empty if they cannot be listed."""
    try:
        found = {path: path.stat() for path in sorted([*folder.glob("*"), *folder.glob("*/*")])}
    except OSError:
        return ()
    return tuple((str(path), one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for path, one in found.items())


class Kept(Generic[Model]):
    """Cache of objects made from a folder's files.

    A key has the folder, and the arguments with which an object was made, `how`. An entry is valid while the folder's
    files are unchanged.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[Files, Model]] = {}

    def keep(self, folder: Path, how: Hashable, files: Files, made: Model) -> None:
        """Store the object `made` from a folder, unless the folder's files have changed.

        Args:
            files: the state of the folder's files before the object was made.
        """
        if files and files == files_of(folder):
            self._found[folder, how] = files, made

    def take(self, folder: Path, how: Hashable) -> Model | None:
        """Return the stored object of a key; None if there is none, or if the folder's files have changed."""
        files, made = self._found.get((folder, how), ((), None))
        return made if files and files == files_of(folder) else None

    def is_stale(self, folder: Path, how: Hashable) -> bool:
        """Whether an object of a key is stored, and the folder's files have changed since."""
        return (folder, how) in self._found and self.take(folder, how) is None

    def everything(self) -> list[Model]:
        """Return all stored objects, including those whose files have changed."""
        return [made for _, made in self._found.values()]
