"""Models that a server has loaded for the processes that it forks. A fork takes one if its files are unchanged."""

from collections.abc import Hashable
from pathlib import Path
from typing import Generic, TypeVar

Model = TypeVar("Model")
Files = tuple[tuple[str, int, int, int, int], ...]
"""Name, inode, size in bytes, modification time and change time in nanoseconds of each file."""


def files_of(folder: Path) -> Files:
    """Describe the files of a folder, and of the folders in it, as they are now; empty if they cannot be listed."""
    try:
        found = {path: path.stat() for path in sorted([*folder.glob("*"), *folder.glob("*/*")])}
    except OSError:
        return ()
    return tuple((str(path), one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for path, one in found.items())


class Kept(Generic[Model]):
    """Objects that were made from the files of a folder, by the way in which they were made."""

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[Files, Model]] = {}

    def keep(self, folder: Path, how: Hashable, files: Files, made: Model) -> None:
        """Keep an object that was made from a folder, whose files were `files` before."""
        if files and files == files_of(folder):
            self._found[folder, how] = files, made

    def take(self, folder: Path, how: Hashable) -> Model | None:
        """Return an object that was made from the files that the folder has now; None if there is none."""
        files, made = self._found.get((folder, how), ((), None))
        return made if files and files == files_of(folder) else None

    def everything(self) -> list[Model]:
        """Return all objects that are kept."""
        return [made for _, made in self._found.values()]
