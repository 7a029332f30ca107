"""The files of one build that are written while their rows come to be, each from its beginning to its end."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from sparsekv.formats.growing_file import GrowingFile, HeadPart
from sparsekv.formats.schema import FileRecord
from sparsekv.formats.unfinished_file import SharedFile, UnfinishedFile


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

    def finish(self, name: str, path: str, recipe: str) -> FileRecord:
        """Name a file whose rows are all there, and return its record."""
        return self._growing.pop(name).finish(path, recipe)

    def discard(self) -> None:
        """Remove all of them; no thread writes."""
        for files in (self._begun, self._growing):
            while files:
                files.popitem()[1].discard()
