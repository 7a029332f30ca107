"""Writes some heads of files that the build's first process has begun; the others' side of `ArtifactWriter`."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from sparsekv.formats.folder import Folder
from sparsekv.formats.growing_file import GrowingPart, HeadPart
from sparsekv.formats.unfinished_file import JoinedFile, SharedFile
from sparsekv.formats.ways_out import WaysOut
from sparsekv.formats.whole_file import WholeFile
from sparsekv.formats.writer import THREADS


class PartWriter:
    """This process's heads of all files that it has joined; it makes, names and removes none.

    Each file can be written from `join` to `end`: only then may the first process name it. It can be read from then on.
    """

    def __init__(self, part: HeadPart):
        self._part, self._folder = part, Path()
        self._files: dict[str, JoinedFile] = {}
        self._rows: dict[str, GrowingPart] = {}
        self._ended: dict[str, WholeFile] = {}
        self._threads = ThreadPoolExecutor(THREADS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        self.leave()

    def join(self, folder: Path, files: Mapping[str, SharedFile]) -> bool:
        """Open files of an index by their names; returns whether all could be, as on another machine they cannot."""
        self._folder = folder
        try:
            opened = Folder(folder)
            for name, shared in files.items():
                self._files[name] = opened.join(shared)
        except OSError:
            return False
        return True

    def leave(self) -> None:
        """Write to none of them; no thread does."""
        while self._files:
            self._files.popitem()[1].close()

    def put(self, name: str, tensors: Mapping[str, torch.Tensor], end: int) -> None:
        """Have a thread write the rows before `end` of tensors [H / parts, N, D], if it has joined a file of this name.

        Raises:
            ArtifactError: earlier ones could not be written.
        """
        if name not in self._files:
            return
        try:
            if name not in self._rows:
                self._rows[name] = GrowingPart(self._files[name], tensors, self._part)
            self._rows[name].put(end, self._threads)
        except OSError as error:
            raise WaysOut().cannot_write(self._folder, error) from None

    def whole(self, name: str) -> WholeFile:
        """A file that it has ended, once the other processes have, too; KeyError for all others."""
        return self._ended[name]

    def end(self, name: str, seconds: float) -> bool:
        """Write no more to a file once its own rows are written; returns whether they are after so many seconds, or it
        has not joined it.

        Raises:
            ArtifactError: they could not be written.
        """
        if name not in self._files:
            return True
        try:
            if not self._rows[name].wait(seconds):
                return False
            del self._rows[name]
            self._ended[name] = WholeFile(self._files[name].descriptor, f"{name} of {self._folder}")
            self._files.pop(name).close()
        except OSError as error:
            raise WaysOut().cannot_write(self._folder, error) from None
        return True
