"""The files of one build that are written while their rows come to be, each from its beginning to its end."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from sparsekv.formats.growing_file import GrowingFile, HeadPart, RemoteSum
from sparsekv.formats.schema import FileRecord
from sparsekv.formats.unfinished_file import SharedFile, UnfinishedFile
from sparsekv.formats.whole_file import WholeFile


class GrowingFiles:
    """Unfinished files by their names; threads may finish them. Every method but `in` raises OSError if it fails.

    Args:
        begin: begins the file of a name and a recipe.
        threads: write the rows.
    """

    def __init__(self, begin: Callable[[str, str], UnfinishedFile], threads: ThreadPoolExecutor):
        self._begin, self._threads = begin, threads
        self._begun: dict[str, UnfinishedFile] = {}
        self._growing: dict[str, GrowingFile] = {}
        self._whole: dict[str, WholeFile] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._growing

    def share(self, name: str, recipe: str) -> SharedFile:
        """Begin a file before its tensors are there, and return what other processes find it by."""
        self._begun[name] = self._begin(name, recipe)
        return self._begun[name].shared

    def put(self, name: str, tensors: Mapping[str, torch.Tensor], recipe: str, end: int, part: HeadPart) -> None:
        """Have a thread write the rows before `end` of a part of the heads; begin the file where it is not."""
        if name not in self._growing:
            if name not in self._begun:
                self._begun[name] = self._begin(name, recipe)
            self._growing[name] = GrowingFile(self._begun[name], tensors, part)
            del self._begun[name]
        self._growing[name].put(end, self._threads)

    def wait(self, name: str, seconds: float) -> bool:
        """Wait so long until this process's rows of a file are written; returns whether they are."""
        return self._growing[name].wait(seconds)

    def end(self, name: str, what: str) -> None:
        """Make a file readable, by `whole`, that has no name yet, once this process has written its rows as all others.

        Args:
            what: what messages call it.
        """
        self._growing[name].wait()
        self._whole[name] = WholeFile(self._growing[name].descriptor, what)

    def whole(self, name: str) -> WholeFile | None:
        """A file that has ended and has no name yet; None for all others."""
        return self._whole.get(name)

    def finish(self, name: str, path: str, recipe: str, remote_sum: RemoteSum | None) -> FileRecord:
        """Name a file whose rows are all there, and return its record."""
        return self._growing.pop(name).finish(path, recipe, remote_sum)

    def drop(self, name: str) -> None:
        """Forget that a file is whole: it is read by its name from now on, or has been given up."""
        self._whole.pop(name, None)

    def discard(self) -> None:
        """Remove all of them; no thread writes."""
        for files in (self._begun, self._growing):
            while files:
                files.popitem()[1].discard()
