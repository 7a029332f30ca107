"""The served indices: opened at their first use, and again when their files change."""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path

from sparsekv.cli.common.console import note
from sparsekv.formats.errors import SparsekvError, UsageError, reason_of
from sparsekv.formats.hints import command
from sparsekv.formats.index.schema import MANIFEST
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
    """Return folders of indices by their names. One that is given twice is served once.

    Raises:
        UsageError: two would be served under one name.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        _refuse_clash(found.setdefault(served_name(folder), folder), folder)
    return found


def refuse_clashes(named: dict[str, Path], folder: Path) -> None:
    """Raise UsageError if another index in a folder has the name of one of the command line."""
    for one in indices_in(folder):
        _refuse_clash(named.get(served_name(one), one), one)


def _refuse_clash(first: Path, second: Path) -> None:
    if first.resolve() != second.resolve():
        raise UsageError(f"{first} and {second} would both be served as {served_name(first)}; rename one of them")


def refuse_no_folder(folder: Path) -> None:
    """Raise UsageError if --indices-from is an index itself."""
    if (folder / MANIFEST).is_file():
        told = f"--indices-from {folder} is an index itself, not a folder of indices"
        raise UsageError(f"{told}; give it as INDEX: {command('serve', folder)}")


def note_broken(folder: Path) -> None:
    """Write a note on each `*.skv` in a folder that has no manifest, so that it is not served."""
    for one in sorted(folder.glob(f"*{ENDING}")):
        if one.is_dir() and not one.is_symlink() and not (one / MANIFEST).is_file():
            note(f"{one} is not served: it has no {MANIFEST}, so it is no whole index", quiet=False)


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
        if name.endswith(ENDING) and (folder / name / MANIFEST).is_file() and name.isprintable():
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
        found = os.stat(folder / MANIFEST)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class Shelf:
    """The indices that the command line names, and those in one folder.

    An index of the folder is opened at the first request for it. An index whose manifest has been replaced is opened
    again; answers that have begun still read the old one. If that fails, or the manifest is missing, the old one stays.
    Beyond the planned memory the index that was asked longest ago is closed, if nobody asks it now; the next request
    for it opens it again.

    Args:
        open_index: opens an index under a name; called in a thread of `executor`.
        folder: where other indices are; None: there are none.
        memory: bytes of keys and values of indices that stay open beside the last one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        open_index: Callable[[str, Path], Served],
        executor: Executor,
        folder: Path | None = None,
        memory: float = inf,
    ):
        self.scheduler, self.open_index, self.executor = scheduler, open_index, executor
        self.folder, self.memory = folder, memory
        self._served: dict[str, Served] = {}
        """Open indices by name; the one that was asked longest ago comes first."""
        self._places: dict[str, tuple[Path, State | None]] = {}
        self._users = Counter[Served]()
        self._opening = asyncio.Lock()

    def put(self, served: Served, folder: Path, state: State | None) -> None:
        """Serve an index from now on, in place of one of the same name; close others if the memory asks for it.

        Args:
            state: the state of its folder before it was opened.
        """
        self._served.pop(served.name, None)
        self.scheduler.add(served.name, served.opened)
        self._served[served.name], self._places[served.name] = served, (folder, state)
        self._make_room()

    def close(self, name: str) -> None:
        """Close an index, if it is open. Its answers that have begun are completed; then its memory is free."""
        if self._served.pop(name, None) is not None:
            self.scheduler.remove(name)
            if self._places[name][0].parent == self.folder:
                del self._places[name]  # it may be gone when it is asked again

    def holds(self, served: Served) -> bool:
        """Whether an index is still served under its name."""
        return self._served.get(served.name) is served

    @contextmanager
    def using(self, served: Served) -> Iterator[None]:
        """Within the context an index is not closed for want of memory."""
        self._users[served] += 1
        try:
            yield
        finally:
            self._users[served] -= 1
            self._users += Counter()  # drops those without users

    def opened(self) -> list[Served]:
        """Return the indices that are open."""
        return [one for name in self._places if (one := self._served.get(name)) is not None]

    def names(self) -> list[str]:
        """Return the names of all indices; those that have been opened come first."""
        return list({**self._places, **self._offered()})

    def is_offered(self, name: str) -> bool:
        """Whether an index is in the folder of indices that come and go."""
        return name in self._offered()

    async def find(self, name: str) -> Served | None:
        """Return an index, which is opened if need be; None if there is no such name.

        Raises:
            SparsekvError: the index cannot be opened.
        """
        if (served := self._current(name)) is not None:
            return served
        async with self._opening:
            if (served := self._current(name)) is not None:
                return served
            folder = self._places[name][0] if name in self._places else self._offered().get(name)
            return None if folder is None else await self._open(name, folder)

    def without_folders(self, message: str) -> str:
        """Return a message with the names of indices' folders in place of their paths, which are not for clients."""
        paths = [folder for folder, _ in self._places.values() if os.sep in str(folder)]
        for path in sorted(paths, key=lambda one: len(str(one)), reverse=True):
            message = message.replace(str(path), path.name)
        return message if self.folder is None else message.replace(f"{self.folder}{os.sep}", "")

    def _current(self, name: str) -> Served | None:
        """Return an index if it is open and its files are those that it was opened from; it is then the last to be
        closed."""
        if name not in self._served:
            return None
        folder, state = self._places[name]
        if state_of(folder) not in (state, None):
            return None
        self._served[name] = self._served.pop(name)
        return self._served[name]

    def _make_room(self) -> None:
        """Close indices that nobody asks until the others are within the planned memory; the last one stays."""
        *others, last = self._served.values()
        taken = sum(one.opened.document_bytes for one in (*others, last))
        for one in others:
            if taken > self.memory and not self._users[one] and not self.scheduler.is_asked(one.opened):
                self.close(one.name)
                taken -= one.opened.document_bytes

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
