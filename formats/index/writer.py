"""Writing an index so that an interruption neither leaves a wrong index nor loses a good one."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import torch

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.errors import WaysOut
from sparsekv.formats.index.build_folder import BuildFolder
from sparsekv.formats.index.folder import Folder, JoinedFile, SharedFile, UnfinishedFile
from sparsekv.formats.index.growing_file import (
    ALL_HEADS,
    GrowingFile,
    GrowingPart,
    HeadPart,
    HeldTensors,
    RemoteSum,
    write_tensors,
)
from sparsekv.formats.index.reader import CPU, WholeFile
from sparsekv.formats.index.schema import FileRecord, Manifest

THREADS = min(16, os.cpu_count() or 1)
SUMS = min(
    64, os.cpu_count() or 1
)  # sums made at a time: that of a layer's keys, by one thread, takes most of a second
HELD_BYTES = 6 << 30  # most bytes of tensors that wait to be written and were made for that


class ArtifactWriter(BuildFolder):
    """One build of one index: its files, in its folder.

    Keeps the tensors of files that wait to be written, and writes one file per core at a time, up to 16. Tensors on a
    GPU stay there, and pass through host memory 16 MiB at a time for each file.
    """

    def __init__(self, folder: Path, *, force: bool = False, ways_out: WaysOut | None = None):
        super().__init__(folder, force=force, ways_out=ways_out)
        self._made: dict[str, Future[FileRecord]] = {}
        self._held, self._new = HeldTensors(HELD_BYTES), set[str]()
        self._threads = ThreadPoolExecutor(THREADS)
        # Pools of their own: a small file need not wait for gigabytes to be summed, nor a sum for those of others.
        self._summing, self._awaiting = ThreadPoolExecutor(SUMS), ThreadPoolExecutor(THREADS)
        self._receiving = ThreadPoolExecutor(1)  # one, as sums come in the order in which files were ended
        self._begun: dict[str, UnfinishedFile] = {}
        self._growing: dict[str, GrowingFile] = {}
        self._ended: dict[str, WholeFile] = {}
        """Files whose rows are all there, and which have no name yet."""

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            for threads in (self._receiving, self._awaiting, self._summing, self._threads):
                threads.shutdown()
            if error is None:
                self._check_made()
        finally:
            try:
                self.unshare_rows()
            finally:
                self._lock.release()

    @property
    def files(self) -> dict[str, FileRecord]:
        """Records of the files that this build wrote or reused, in order; waits until all of them are on disk.

        Raises:
            ArtifactError: a file could not be written.
        """
        return {name: made.result() for name, made in self._made.items()}

    def record(self, name: str) -> FileRecord:
        """The record of one of these files; waits until it is on disk, and raises what `files` raises."""
        return self._made[name].result()

    def reuse(self, name: str, recipe: str, of: Sequence[str] = ()) -> bool:
        """Reuse a whole file of an earlier build if the same recipe made it; returns whether there was one.

        Args:
            of: files of this build that it is made from. What is made from a file that this build writes is made anew.
        """
        return self._new.isdisjoint(of) and self.reuse_all({name: self._whole_recipe(recipe, of)})

    def reuse_all(self, recipes: Mapping[str, str]) -> bool:
        """Reuse files by name, each made by its recipe, if all of them are whole; returns whether they are."""
        whole = {name: record for name, recipe in recipes.items() if (record := self._found(name, recipe))}
        for name, record in whole.items() if len(whole) == len(recipes) else ():
            self._made[name] = Future()
            self._made[name].set_result(record)
            self._journal.reuse(name, record)
        return len(whole) == len(recipes)

    def _found(self, name: str, recipe: str) -> FileRecord | None:
        """The record of a whole file that this build, or an earlier one, made by a recipe."""
        if name in self._made:
            self._made[name].result()
        return None if self.force and name not in self._made else self._earlier(name, recipe)

    def write(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        recipe: str,
        of: Sequence[str] = (),
        *,
        wait: bool = True,
    ) -> None:
        """Write one logical file in a thread, and record it in the journal once all of it is on disk.

        The tensors are held until then, and must not change. Rows that `write_rows` has written are not written again.

        Args:
            recipe: the hash of everything that decides the content, but for `of`.
            of: files of this build that it is made from, whose contents are part of the recipe.
            wait: return only when at most 6 GiB are held, in all. False for tensors that stay in memory anyway.

        Raises:
            ArtifactError: an earlier file could not be written.
        """
        self._wait_for_earlier(name)
        self._held.add(name, tensors, wait=wait)
        self._new.add(name)
        self._made[name] = self._threads.submit(self._store, name, tensors, recipe, of, None)

    def share_rows(self, name: str, recipe: str) -> SharedFile:
        """Begin a file of which other processes write the rows of their heads, and return what they find it by.

        `write_rows` writes those of this one's, and `end_rows` ends the file.

        Raises:
            ArtifactError: it cannot be written.
        """
        with self._writing():
            self._begun[name] = self._begin(name, recipe)
            return self._begun[name].shared

    def unshare_rows(self) -> None:
        """Remove files that have no name yet: no process writes to them."""
        for files in (self._begun, self._growing):
            while files:
                files.popitem()[1].discard()

    def write_rows(
        self, name: str, tensors: Mapping[str, torch.Tensor], recipe: str, end: int, part: HeadPart = ALL_HEADS
    ) -> None:
        """Write what is there of a file before all of it is, in a thread: rows before `end` of tensors [H, N, D].

        `write` ends the file; the tensors are those that it will be given. Where `share_rows` has begun it they are a
        part of the heads, and `end_rows` ends it.

        Raises:
            ArtifactError: it cannot be written.
        """
        with self._writing():
            if name not in self._growing:
                if name not in self._begun:
                    self._begun[name] = self._begin(name, recipe)
                self._growing[name] = GrowingFile(self._begun[name], tensors, part)
                del self._begun[name]
            self._growing[name].put(end, self._threads)

    def rows_written(self, name: str, seconds: float) -> bool:
        """Wait so long until this process's rows of a shared file are written; returns whether they are.

        Raises:
            ArtifactError: they could not be written.
        """
        with self._writing():
            return self._growing[name].wait(seconds)

    def end_rows(self, name: str, recipe: str, remote_sum: RemoteSum | None = None) -> None:
        """End a file that `share_rows` began, in a thread, once the other processes have written their rows.

        Nothing of it is held in memory: `read` reads the file, which need not have its sum and its name for that.

        Args:
            remote_sum: gives the sum, if another process makes it; called in the order in which files are ended.

        Raises:
            ArtifactError: an earlier file could not be written, or this one cannot be read.
        """
        assert name in self._growing
        self._wait_for_earlier(name)
        with self._writing():
            self._growing[name].wait()
            self._ended[name] = WholeFile(self._growing[name].descriptor, f"{name} of {self.folder}")
        self._new.add(name)
        received = remote_sum and self._receiving.submit(remote_sum).result
        threads = self._awaiting if received else self._summing
        self._made[name] = threads.submit(self._store, name, {}, recipe, (), received)

    def is_new(self, name: str) -> bool:
        """Whether this build writes a file, rather than reuse it."""
        return name in self._new

    def find(self, name: str) -> SharedFile:
        """A handle by which another process opens a file of this build; waits until the file is on disk.

        Raises:
            ArtifactError: it could not be written, or is there no more.
        """
        path = self._made[name].result().path
        with self._writing():
            descriptor = self._folder.open(path)
        try:
            return SharedFile.of(path, descriptor)
        finally:
            os.close(descriptor)

    def read(self, name: str, device: torch.device = CPU) -> dict[str, torch.Tensor]:
        """Tensors of a file that this build writes or reuses, on a device: those to be written, or from the disk."""
        held = self._held.get(name)
        if held is not None:
            return {key: tensor.to(device) for key, tensor in held.items()}
        if ended := self._ended.get(name):
            return ended.read(device)
        return self._read(name, self._made[name].result(), device)

    def finish(self, manifest: Manifest) -> Manifest:
        """Seal the index: write the manifest, with all files of this build, in place of an earlier one."""
        return self._seal(manifest.model_copy(update={"files": self.files}))

    def _whole_recipe(self, recipe: str, of: Sequence[str]) -> str:
        """A recipe that includes the contents of files of this build, which it waits for."""
        return hash_json([recipe, {name: self._made[name].result().sha256 for name in of}]) if of else recipe

    def _begin(self, name: str, recipe: str) -> UnfinishedFile:
        return self._folder.begin(self._journal.name(self._free_path(name, recipe)))

    def _wait_for_earlier(self, name: str) -> None:
        """Wait for a file of the same name, and raise ArtifactError where any file could not be written."""
        self._check_made()
        if name in self._made:
            self._made[name].result()

    def _check_made(self) -> None:
        for made in self._made.values():
            if made.done():
                made.result()

    def _store(
        self, name: str, tensors: Mapping[str, torch.Tensor], recipe: str, of: Sequence[str], remote: RemoteSum | None
    ) -> FileRecord:
        try:
            # Threads take files in order, and others take shared ones: what this one waits for is being written.
            recipe = self._whole_recipe(recipe, of)
            path = self._free_path(name, recipe)
            with self._writing():
                if name in self._growing:
                    record = self._growing.pop(name).finish(path, recipe, remote)
                else:
                    record = write_tensors(self._folder, self._journal.name(path), tensors, recipe)
                self._journal.add(name, record)
            return record
        finally:
            self._held.drop(name)
            self._ended.pop(name, None)


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

    def __exit__(self, kind: object, error: object, trace: object) -> None:
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
