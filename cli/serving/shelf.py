"""The served indices: opened at their first use, and again when their files change."""

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from sparsekv.cli.common.console import note
from sparsekv.formats.errors import SparsekvError, UsageError, reason_of
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.serving.scheduler import Scheduler

ENDING = ".skv"


def served_name(folder: Path) -> str:
    """Return the name under which an index is served: its folder's, without the ending.

    Raises:
        UsageError: the name is not text in UTF-8.
    """
    name = folder.absolute().name.removesuffix(ENDING)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{folder}: its name is not text in UTF-8, so no request can name it; rename it") from None
    return name


def folders_by_name(folders: Iterable[Path]) -> dict[str, Path]:
    """Return folders of indices by their names. Raises UsageError if two would be served under one name."""
    found: dict[str, Path] = {}
    for folder in folders:
        name = served_name(folder)
        if name in found:
            raise UsageError(f"{found[name]} and {folder} would both be served as {name}; rename one of them")
        found[name] = folder
    return found


def indices_in(folder: Path) -> Iterator[Path]:
    """Yield the indices in a folder in the order of their names, without links.

    Raises:
        UsageError: the folder cannot be read.
    """
    try:
        found = [one.name for one in os.scandir(folder) if one.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise UsageError(f"--indices-from {folder} cannot be read: {reason_of(error)}; name a folder") from None
    for name in sorted(found):
        if name.endswith(ENDING) and (folder / name / "manifest.json").is_file() and name.isprintable():
            yield folder / name


@dataclass(frozen=True, eq=False)
class Served:
    """An index that is open, and the config of requests that name no method, budget or prefill.

    budget: the budget that the command line gave, which holds for every method; None for each method's own.
    """

    name: str
    opened: OpenIndex
    config: DecodeConfig
    budget: str | None


State = tuple[int, int, int]


def state_of(folder: Path) -> State | None:
    """Return what changes when an index is replaced: the identity of its manifest's file. None: there is none."""
    try:
        found = os.stat(folder / "manifest.json")
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class Shelf:
    """The indices that the command line names, and those in one folder.

    An index of the folder is opened at the first request for it. An index whose manifest has been replaced is opened
    again; answers that have begun still read the old one. If that fails, or the manifest is missing, the old one stays.

    Args:
        open_index: opens an index under a name; called in a thread of `executor`.
        folder: where other indices are; None: there are none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        open_index: Callable[[str, Path], Served],
        executor: Executor,
        folder: Path | None = None,
    ):
        self.scheduler, self.open_index, self.executor, self.folder = scheduler, open_index, executor, folder
        self._served: dict[str, Served] = {}
        self._places: dict[str, tuple[Path, State | None]] = {}
        self._opening = asyncio.Lock()

    def put(self, served: Served, folder: Path, state: State | None) -> None:
        """Serve an index from now on, in place of one of the same name.

        Args:
            state: the state of its folder before it was opened.
        """
        self.scheduler.add(served.name, served.opened)
        self._served[served.name], self._places[served.name] = served, (folder, state)

    def holds(self, served: Served) -> bool:
        """Whether an index is still served under its name."""
        return self._served.get(served.name) is served

    def opened(self) -> list[Served]:
        """Return the indices that are open."""
        return list(self._served.values())

    def names(self) -> list[str]:
        """Return the names of all indices; those that are open come first."""
        return [*self._served, *(name for name in self._offered() if name not in self._served)]

    async def find(self, name: str) -> Served | None:
        """Return an index, which is opened if need be; None if there is no such name.

        Raises:
            SparsekvError: the index cannot be opened.
        """
        if self._is_current(name):
            return self._served[name]
        async with self._opening:
            if self._is_current(name):
                return self._served[name]
            folder = self._places[name][0] if name in self._places else self._offered().get(name)
            return None if folder is None else await self._open(name, folder)

    def without_folders(self, message: str) -> str:
        """Return a message with the names of indices in place of their paths, which are not for clients."""
        for name, (folder, _) in self._places.items():
            message = message.replace(str(folder), name)
        return message if self.folder is None else message.replace(f"{self.folder}{os.sep}", "")

    def _is_current(self, name: str) -> bool:
        if name not in self._served:
            return False
        folder, state = self._places[name]
        return state_of(folder) in (state, None)

    def _offered(self) -> dict[str, Path]:
        return {} if self.folder is None else {served_name(one): one for one in indices_in(self.folder)}

    async def _open(self, name: str, folder: Path) -> Served:
        state, before = state_of(folder), self._served.get(name)
        try:
            served = await asyncio.get_running_loop().run_in_executor(self.executor, self.open_index, name, folder)
        except SparsekvError as error:
            if before is None:
                raise
            note(f"{name} is served as it was before, because the new one cannot be opened: {error}", quiet=False)
            self._places[name] = folder, state
            return before
        self.put(served, folder, state)
        return served
