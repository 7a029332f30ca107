"""Writes an artifact so that an interruption at any point neither leaves a wrong index nor loses a good one.

Every file is written under a temporary name, synced and renamed; a journal (`unfinished.json`) lists whole files, each
with the hash of what decides its content (its recipe); the manifest is written last. If the folder already has a
finished index, the base, that stays valid until the new manifest replaces its own: changed files get other paths.
Several threads write files, and each file is in the journal as soon as it is whole.

The journal also lists every path before it is written, and the paths of the base. At the end the paths in the journal
that are not in the new manifest are removed; nothing else in the folder is ever touched.
"""

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.folder import Folder
from sparsekv.formats.growing_file import ALL_HEADS, HeadPart, Told, untold
from sparsekv.formats.growing_files import GrowingFiles
from sparsekv.formats.held_tensors import HeldTensors
from sparsekv.formats.journal import JOURNAL, KeptJournal
from sparsekv.formats.lock import acquire_lock
from sparsekv.formats.manifest import manifest_bytes, manifest_in
from sparsekv.formats.marker import MARKER, mark
from sparsekv.formats.ours import refuse_foreign
from sparsekv.formats.reader import CPU
from sparsekv.formats.recorded_file import is_whole, read_recorded
from sparsekv.formats.schema import MANIFEST, FileRecord, Manifest
from sparsekv.formats.tensor_bytes import write_tensors
from sparsekv.formats.unfinished_file import SharedFile, UnfinishedFile
from sparsekv.formats.ways_out import WaysOut

THREADS = min(16, os.cpu_count() or 1)
SUMS = min(64, os.cpu_count() or 1)
"""Files whose sums are made at a time: each of a layer's keys and values, by one thread, takes most of a second."""
HELD_BYTES = 6 << 30  # most bytes of tensors that wait to be written and were made for that


class ArtifactWriter:
    """One build of one index, under the lock of its folder.

    Keeps the tensors of files that wait to be written, and writes one file per core at a time, up to 16. Tensors on a
    GPU stay there, and pass through host memory 16 MiB at a time for each file.

    Args:
        folder: the artifact, `NAME.skv`; created when missing.
        force: reuse nothing; a finished index in the folder still stays valid until `finish`.

    Raises:
        ArtifactError: the folder cannot be written, is not an index of sparsekv, or another build has its lock.
    """

    def __init__(self, folder: Path, *, force: bool = False, ways_out: WaysOut | None = None):
        self.folder = folder
        self.force = force
        self.base: Manifest | None = None
        self._ways_out = ways_out or WaysOut()
        self._made: dict[str, Future[FileRecord]] = {}
        self._held = HeldTensors(HELD_BYTES)
        self._journal: KeptJournal
        self._new = set[str]()
        self._threads = ThreadPoolExecutor(THREADS)
        # Apart, so that what is small is not written after gigabytes are summed, nor any sum made after those awaited.
        self._summing, self._told = ThreadPoolExecutor(SUMS), ThreadPoolExecutor(1)
        self._growing = GrowingFiles(self._begin, self._threads)

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._folder = Folder(self.folder)
            refuse_foreign(self._folder)
            self._lock = acquire_lock(self.folder)
        except OSError as error:
            raise self._cannot_write(error) from None
        try:
            self._recover()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for threads in (self._told, self._summing, self._threads):
                threads.shutdown()
            if error is None:
                self._check_made()
        finally:
            try:
                self._growing.discard()
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

    @property
    def notes(self) -> dict[str, Any]:
        """Notes of this build, and of the interrupted builds that it resumes."""
        return self._journal.notes

    def reuse(self, name: str, recipe: str, of: Sequence[str] = ()) -> bool:
        """Reuse a whole file of an earlier build if the same recipe made it; returns whether there was one.

        Args:
            of: files of this build that it is made from. What is made from a file that this build writes is made anew.
        """
        if not self._new.isdisjoint(of):
            return False
        recipe = self._whole_recipe(recipe, of)
        if name in self._made:
            self._made[name].result()
        elif self.force:
            return False
        for record in (self._journal.files.get(name), self.base.files.get(name) if self.base else None):
            if record and record.recipe == recipe and self.is_whole(record):
                self._made[name] = Future()
                self._made[name].set_result(record)
                self._journal.reuse(name, record)
                return True
        return False

    def write(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        recipe: str,
        of: Sequence[str] = (),
        *,
        wait: bool = True,
    ) -> None:
        """Write one logical file atomically and record it in the journal, in a thread.

        The tensors must not change until `files` returns.

        Args:
            of: files of this build that it is made from, whose contents are part of the recipe.
            wait: until it and the files that wait to be written have at most 6 GiB; not for tensors that would take
                the memory anyway.

        Raises:
            ArtifactError: an earlier file could not be written.
        """
        self._wait_for_earlier(name)
        self._held.add(name, tensors, wait=wait)
        self._submit(name, tensors, recipe, of)

    def share_rows(self, name: str, recipe: str) -> SharedFile:
        """Begin a file of which other processes write the rows of their heads, and return what they find it by.

        `write_rows` writes those of this one's, and `end_rows` ends the file.

        Raises:
            ArtifactError: it cannot be written.
        """
        try:
            return self._growing.share(name, recipe)
        except OSError as error:
            raise self._cannot_write(error) from None

    def unshare_rows(self) -> None:
        """Remove what `share_rows` began: other processes do not write, and this one has not begun to."""
        self._growing.discard()

    def write_rows(
        self, name: str, tensors: Mapping[str, torch.Tensor], recipe: str, end: int, part: HeadPart = ALL_HEADS
    ) -> None:
        """Write what is there of a file before all of it is, in a thread: rows before `end` of tensors [H, N, D].

        `write` ends the file; the tensors are those that it will be given. Where `share_rows` has begun it they are a
        part of the heads, and `end_rows` ends it.

        Raises:
            ArtifactError: it cannot be written.
        """
        try:
            self._growing.put(name, tensors, recipe, end, part)
        except OSError as error:
            raise self._cannot_write(error) from None

    def rows_written(self, name: str, seconds: float) -> bool:
        """Wait so long until this process's rows of a shared file are written; returns whether they are.

        Raises:
            ArtifactError: they could not be written.
        """
        try:
            return self._growing.wait(name, seconds)
        except OSError as error:
            raise self._cannot_write(error) from None

    def end_rows(self, name: str, recipe: str, told: Told = untold) -> None:
        """End a file that `share_rows` began, in a thread, once the other processes have written their rows.

        Nothing of it is held in memory: `read` reads the file, which need not have its sum and its name for that.

        Args:
            told: waits for the sum, if another process makes it. Files that have one are ended in order.

        Raises:
            ArtifactError: an earlier file could not be written, or this one cannot be read.
        """
        assert name in self._growing
        self._wait_for_earlier(name)
        try:
            self._growing.end(name, f"{name} of {self.folder}")
        except OSError as error:
            raise self._cannot_write(error) from None
        self._new.add(name)
        threads = self._summing if told is untold else self._told
        self._made[name] = threads.submit(self._store, name, {}, recipe, (), told)

    def is_new(self, name: str) -> bool:
        """Whether this build writes a file, rather than reuse it."""
        return name in self._new

    def find(self, name: str) -> SharedFile:
        """What another process finds a file of this build by; waits until it is on disk.

        Raises:
            ArtifactError: it could not be written, or is there no more.
        """
        path = self._made[name].result().path
        try:
            descriptor = self._folder.open(path)
        except OSError as error:
            raise self._cannot_write(error) from None
        try:
            return SharedFile.of(path, descriptor)
        finally:
            os.close(descriptor)

    def read(self, name: str, device: torch.device = CPU) -> dict[str, torch.Tensor]:
        """Tensors of a file that this build writes or reuses, on a device: those to be written, or from the disk."""
        held = self._held.get(name)
        if held is not None:
            return {key: tensor.to(device) for key, tensor in held.items()}
        if whole := self._growing.whole(name):
            return whole.read(device)
        return self._read(name, self._made[name].result(), device)

    def read_base(self, name: str, device: torch.device = CPU) -> dict[str, torch.Tensor]:
        """Tensors of a file of the base, the finished index that was in the folder, on a device."""
        assert self.base is not None
        return self._read(name, self.base.files[name], device)

    def is_whole(self, record: FileRecord) -> bool:
        """Whether the file of a record exists with the content that was written."""
        return is_whole(self._folder, record)

    def leave_as_it_was(self) -> None:
        """End a build that changed nothing in the finished index."""
        assert self.base is not None
        self._remove_strays(self.base)

    def clear_finished(self) -> None:
        """Remove leftovers of a build that was interrupted after it wrote the manifest; keep those of one to resume."""
        assert self.base is not None
        if all(record in self.base.files.values() for record in self._journal.files.values()):
            self._remove_strays(self.base)

    def note(self, name: str, value: Any) -> None:
        """Store a small JSON value until the manifest is written; `notes` returns it after an interruption."""
        try:
            self._journal.note(name, value)
        except OSError as error:
            raise self._cannot_write(error) from None

    def need_space(self, size: int) -> None:
        """Raise ArtifactError if the disk has fewer than `size` free bytes; called before hours of work are spent."""
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise self._ways_out.no_space(self.folder, size, free)

    def finish(self, manifest: Manifest) -> Manifest:
        """Seal the index: write the manifest in place of an earlier one, and remove files that are no longer named."""
        data, sealed = manifest_bytes(manifest.model_copy(update={"files": self.files}))
        try:
            self._journal.write()
            self._folder.write(MANIFEST, [data])
        except OSError as error:
            raise self._cannot_write(error) from None
        self._remove_strays(sealed)
        self.base, self._journal = sealed, KeptJournal(self._folder, forget=True)
        return sealed

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

    def _submit(self, name: str, tensors: Mapping[str, torch.Tensor], recipe: str, of: Sequence[str]) -> None:
        self._new.add(name)
        self._made[name] = self._threads.submit(self._store, name, tensors, recipe, of)

    def _check_made(self) -> None:
        for made in self._made.values():
            if made.done():
                made.result()

    def _store(
        self, name: str, tensors: Mapping[str, torch.Tensor], recipe: str, of: Sequence[str], told: Told = untold
    ) -> FileRecord:
        try:
            # Threads take files in order, and others take shared ones: what this one waits for is being written.
            recipe = self._whole_recipe(recipe, of)
            path = self._free_path(name, recipe)
            try:
                if name in self._growing:
                    record = self._growing.finish(name, path, recipe, told)
                else:
                    record = write_tensors(self._folder, self._journal.name(path), tensors, recipe)
                self._journal.add(name, record)
            except OSError as error:
                raise self._cannot_write(error) from None
            return record
        finally:
            self._held.drop(name)
            self._growing.drop(name)

    def _read(self, name: str, record: FileRecord, device: torch.device) -> dict[str, torch.Tensor]:
        return read_recorded(self._folder, record, f"{name} of {self.folder}", device)

    def _recover(self) -> None:
        try:
            if MANIFEST in self._folder.names():
                self.base = manifest_in(self._folder)
        except ArtifactError:
            if not self.force:
                raise
        self._journal = KeptJournal(self._folder, forget=self.force)
        # What a killed build had written of its files may be as large as the index.
        with contextlib.suppress(OSError):
            self._folder.remove([], leftovers_of=self._journal.paths)
        if self.base is not None:
            # So that they are still known once a new manifest has replaced the one that names them.
            self._journal.know(record.path for record in self.base.files.values())
        try:
            mark(self._folder)
        except OSError as error:
            raise self._cannot_write(error) from None

    def _free_path(self, name: str, recipe: str) -> str:
        """The logical name itself, or one with the recipe's hash while the base still uses the name."""
        in_use = {record.path for record in self.base.files.values()} if self.base else set()
        if name not in in_use:
            return name
        stem, suffix = os.path.splitext(name)
        return f"{stem}.{recipe[:8]}{suffix}"

    def _cannot_write(self, error: OSError) -> ArtifactError:
        return self._ways_out.cannot_write(self.folder, error)

    def _remove_strays(self, manifest: Manifest) -> None:
        kept = {record.path for record in manifest.files.values()}
        try:
            self._folder.remove(self._journal.paths - kept, leftovers_of={*kept, MANIFEST, MARKER})
            # Last, because it lists what is still to be removed if this process dies.
            self._folder.remove([JOURNAL])
        except OSError as error:
            raise self._cannot_write(error) from None
