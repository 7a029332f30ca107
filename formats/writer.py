"""Writing an artifact so that no interruption, at any point, leaves a wrong one or loses a good one.

Every file is written to a temporary name, synced and renamed; a journal (`unfinished.json`) remembers the whole
ones with the hash of what decides their content (their recipe); the manifest comes last. A finished index that is
built upon stays valid until the new manifest replaces its own: changed files get a name of their own meanwhile.
Threads write several files at once, each of which is in the journal as soon as it is whole.

The journal also names every path before something is written to it, and the paths of the index that is built upon.
What is removed at the end is what it names and the new manifest does not: nothing else in the folder is ever touched.
"""

import hashlib
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from sparsekv.formats.checksums import hash_descriptor
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.folder import Folder
from sparsekv.formats.journal import JOURNAL, Journal, read_journal
from sparsekv.formats.lock import acquire_lock
from sparsekv.formats.manifest import manifest_bytes, manifest_in
from sparsekv.formats.marker import MARKER, mark
from sparsekv.formats.ours import refuse_foreign
from sparsekv.formats.reader import map_tensors
from sparsekv.formats.schema import MANIFEST, FileRecord, Manifest, TensorRecord
from sparsekv.formats.tensor_bytes import safetensors_bytes
from sparsekv.formats.ways_out import WaysOut

THREADS = min(16, os.cpu_count() or 1)
HELD_BYTES = 6 << 30


class ArtifactWriter:
    """One build of one index, held under a lock.

    Memory: the tensors of files that are being written, at most 6 GiB of them and one file per core, up to 16; where
    they are on a GPU they stay there, and 16 MiB of each are in host memory at a time.

    Args:
        folder: the artifact, `NAME.skv`; created when missing.
        force: reuse nothing; a finished index in the folder still stays valid until `finish`.

    Raises:
        ArtifactError: the folder cannot be written, is not ours, or another build holds it.
    """

    def __init__(self, folder: Path, *, force: bool = False, ways_out: WaysOut | None = None):
        self.folder = folder
        self.force = force
        self.base: Manifest | None = None
        self._ways_out = ways_out or WaysOut()
        self._made: dict[str, Future[FileRecord]] = {}
        self._journal = Journal()
        self._held: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(THREADS)
        # Guards the journal with its notes, and what is held. It is entered as itself, never as the condition, whose
        # __enter__ is Python's: Ctrl-C in there would leave it locked for ever.
        self._guard = threading.RLock()
        self._changed = threading.Condition(self._guard)

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
            self._threads.shutdown()
            if error is None:
                self._check_made()
        finally:
            self._lock.release()

    @property
    def files(self) -> dict[str, FileRecord]:
        """What this build has written or taken over, in this order; waits until all of it is on disk.

        Raises:
            ArtifactError: a file could not be written.
        """
        return {name: made.result() for name, made in self._made.items()}

    @property
    def notes(self) -> dict[str, Any]:
        """What builds before this one, that were interrupted, have noted, and this one."""
        return self._journal.notes

    def reuse(self, name: str, recipe: str) -> bool:
        """Take over a whole file of an earlier build when the same recipe made it. True when it was there."""
        if name in self._made:
            self._made[name].result()
        elif self.force:
            return False
        for record in (self._journal.files.get(name), self.base.files.get(name) if self.base else None):
            if record and record.recipe == recipe and self.is_whole(record):
                self._made[name] = Future()
                self._made[name].set_result(record)
                with self._guard:
                    self._journal.files[name] = record
                return True
        return False

    def write(self, name: str, tensors: Mapping[str, torch.Tensor], recipe: str) -> None:
        """Write one logical file atomically and remember it in the journal, in a thread; waits while too much is held.

        The tensors may not change until `files` says that they are written.

        Raises:
            ArtifactError: a file before this one could not be written.
        """
        self._check_made()
        if name in self._made:
            self._made[name].result()
        path = self._free_path(name, recipe)
        size = sum(tensor.nbytes for tensor in tensors.values())
        with self._guard:
            self._changed.wait_for(lambda: self._has_room(size))
            self._held[name] = size
        self._made[name] = self._threads.submit(self._store, name, path, tensors, recipe)

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors of a file that this build has written or taken over; waits until it is on disk."""
        return self._map(name, self._made[name].result())

    def read_base(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors of a file of the finished index that is being built upon."""
        assert self.base is not None
        return self._map(name, self.base.files[name])

    def is_whole(self, record: FileRecord) -> bool:
        """Whether the file that a record names is there and holds what was written."""
        # The sum, not only the size: a kill between a rename and the journal leaves another recipe's file there.
        try:
            descriptor = self._folder.open(record.path)
        except OSError:
            return False
        try:
            return os.fstat(descriptor).st_size == record.bytes and hash_descriptor(descriptor) == record.sha256
        finally:
            os.close(descriptor)

    def leave_as_it_was(self) -> None:
        """End a build that changed nothing of the finished index."""
        assert self.base is not None
        self._remove_strays(self.base)

    def clear_finished(self) -> None:
        """Remove what a build has left that was interrupted after its manifest; of one that can go on, nothing."""
        assert self.base is not None
        if all(record in self.base.files.values() for record in self._journal.files.values()):
            self._remove_strays(self.base)

    def note(self, name: str, value: Any) -> None:
        """Remember a small JSON value until the manifest is written; `notes` gives it back after an interruption."""
        with self._guard:
            self._journal.notes[name] = value
            self._write_journal()

    def need_space(self, size: int) -> None:
        """Raise ArtifactError when the disk has less than `size` free bytes, before hours of work are spent."""
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise self._ways_out.no_space(self.folder, size, free)

    def finish(self, manifest: Manifest) -> Manifest:
        """Seal the index: the manifest replaces the earlier one, and files that nothing names are removed."""
        data, sealed = manifest_bytes(manifest.model_copy(update={"files": self.files}))
        self._write_journal()
        self._write_file(MANIFEST, [data])
        self._remove_strays(sealed)
        self.base, self._journal = sealed, Journal()
        return sealed

    def _has_room(self, size: int) -> bool:
        return not self._held or (len(self._held) < THREADS and sum(self._held.values()) + size <= HELD_BYTES)

    def _check_made(self) -> None:
        for made in self._made.values():
            if made.done():
                made.result()

    def _store(self, name: str, path: str, tensors: Mapping[str, torch.Tensor], recipe: str) -> FileRecord:
        try:
            sha256, size = hashlib.sha256(), 0
            self._name_before(path)

            def counted() -> Iterator[bytes | memoryview]:
                nonlocal size
                for piece in safetensors_bytes(tensors):
                    sha256.update(piece)
                    size += len(piece)
                    yield piece

            self._write_file(path, counted())
            record = FileRecord(
                path=path,
                bytes=size,
                sha256=sha256.hexdigest(),
                recipe=recipe,
                tensors={
                    key: TensorRecord(shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
                    for key, tensor in tensors.items()
                },
            )
            with self._guard:
                self._journal.files[name] = record
                self._write_journal()
            return record
        finally:
            with self._guard:
                del self._held[name]
                self._changed.notify_all()

    def _name_before(self, path: str) -> None:
        with self._guard:
            if path not in self._journal.paths:
                self._journal.paths.add(path)
                self._write_journal()

    def _map(self, name: str, record: FileRecord) -> dict[str, torch.Tensor]:
        descriptor = self._folder.open(record.path)
        try:
            return map_tensors(descriptor, f"{name} of {self.folder}")
        finally:
            os.close(descriptor)

    def _recover(self) -> None:
        try:
            if MANIFEST in self._folder.names():
                self.base = manifest_in(self._folder)
        except ArtifactError:
            if not self.force:
                raise
        earlier = read_journal(self._folder) or Journal()
        self._journal = Journal(paths=earlier.paths) if self.force else earlier
        if self.base is not None:
            # So that they are still known when the manifest that names them has been replaced.
            self._journal.paths |= {record.path for record in self.base.files.values()}
        try:
            mark(self._folder)
        except OSError as error:
            raise self._cannot_write(error) from None

    def _write_journal(self) -> None:
        self._write_file(JOURNAL, [self._journal.to_bytes()])

    def _free_path(self, name: str, recipe: str) -> str:
        """The logical name itself, unless the finished index that is being built upon still needs it."""
        in_use = {record.path for record in self.base.files.values()} if self.base else set()
        if name not in in_use:
            return name
        stem, suffix = os.path.splitext(name)
        return f"{stem}.{recipe[:8]}{suffix}"

    def _write_file(self, path: str, data: Iterable[bytes | memoryview]) -> None:
        try:
            self._folder.write(path, data)
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> ArtifactError:
        return self._ways_out.cannot_write(self.folder, error)

    def _remove_strays(self, manifest: Manifest) -> None:
        kept = {record.path for record in manifest.files.values()}
        try:
            self._folder.remove(self._journal.paths - kept, leftovers_of={*kept, MANIFEST, MARKER})
            # Last: until then it names what is still to be removed, should this process die.
            self._folder.remove([JOURNAL])
        except OSError as error:
            raise self._cannot_write(error) from None
