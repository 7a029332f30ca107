"""Manage an index's folder during a build: its lock, the previous index in it, and leftovers of earlier builds."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import torch

from sparsekv.formats.checksums import hash_descriptor
from sparsekv.formats.errors import ArtifactError, WaysOut, reason_of
from sparsekv.formats.index.folder import LOCK, MARKER, Folder, acquire_lock, is_marked, mark
from sparsekv.formats.index.kept_prefill import NOTE, PrefillNote, prefill_note
from sparsekv.formats.index.layout import check_layout, check_names, in_this_form
from sparsekv.formats.index.manifest import (
    JOURNAL,
    Journal,
    KeptJournal,
    is_index,
    manifest_bytes,
    manifest_in,
    read_journal,
)
from sparsekv.formats.index.reader import CPU, map_tensors, on_device
from sparsekv.formats.index.schema import MANIFEST, FileRecord, Manifest

_BEFORE_ALL = re.compile(rf"{re.escape(LOCK)}|{re.escape(MARKER)}(\.[0-9a-f]{{8}}\.tmp)?")
"""Pattern of the files that a build creates first: the lock and the marker. A build that is killed right after its
start leaves only these."""


def refuse_foreign(folder: Folder) -> None:
    """Raise ArtifactError if a folder has files in it but is no index.

    An index has the marker file, or an intact manifest or journal: earlier versions wrote no marker.
    """
    others = [name for name in folder.names() if not _BEFORE_ALL.fullmatch(name)]
    if others and not is_marked(folder) and not is_index(folder) and read_journal(folder) is None:
        raise ArtifactError(
            f"{folder.path} is not an index and contains other files ({others[0]}); name an index inside it, "
            f"such as --output {folder.path}/NAME.skv, or another folder"
        )


def check_output(path: Path) -> None:
    """Check that an index can be written to a path. Called before a model is loaded.

    Raises:
        ArtifactError: the path is a file or below one, is a folder with files and no index, or cannot be read or
            written.
    """
    if os.path.lexists(path):
        if not path.is_dir():
            raise ArtifactError(f"{path} is a file, and an index is a folder; choose another name with --output")
        try:
            refuse_foreign(Folder(path))
        except OSError as error:
            raise ArtifactError(
                f"cannot read {path}: {reason_of(error)}; make it readable, or choose another folder with --output"
            ) from None
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir():
        raise ArtifactError(f"cannot write {path}: {there} is a file, not a folder; choose another name with --output")
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        raise ArtifactError(
            f"cannot write {path}: permission denied; get permission to write there, or choose another folder "
            "with --output"
        )


class BuildFolder:
    """The folder of one build. Entering the context creates the folder and acquires its lock.

    A build that leaves nothing to resume, such as one that is refused, leaves no folder that it has created.

    Args:
        folder: the index's folder, `NAME.skv`; created if missing.
        force: reuse no files. A finished index in the folder stays valid until it is replaced.
        ways_out: remedies that error messages suggest.

    Raises:
        ArtifactError: the folder cannot be written, is not an index of sparsekv, or another build has its lock. Without
            `force`, also if its manifest is damaged or from a newer version.
    """

    def __init__(self, folder: Path, *, force: bool = False, ways_out: WaysOut | None = None):
        self.folder = folder
        self.force = force
        self.base: Manifest | None = None
        self._ways_out = ways_out or WaysOut()
        self._journal: KeptJournal
        self.unfinished = 0
        """Number of files that an interrupted build completed and the finished index lacks."""
        self._whole = set[tuple[str, str]]()
        self._damaged: dict[str, bool] = {}  # whether `newly_damaged` has returned the path, by path
        self._created = list[Path]()  # folders that this build has created, the innermost first

    def __enter__(self) -> Self:
        with self._writing():
            self._create()
            self._folder = Folder(self.folder)
            refuse_foreign(self._folder)
            self._lock = acquire_lock(self.folder)
        try:
            self._recover()
        except BaseException:
            self._leave()
            raise
        return self

    def _create(self) -> None:
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        for path in reversed(missing):
            with suppress(FileExistsError):  # another process has just created it
                path.mkdir()
                self._created.insert(0, path)

    def _leave(self) -> None:
        """Release the lock. If the folder holds nothing to resume, remove this build's files and folders before."""
        try:
            with suppress(OSError):
                self._remove_if_empty()
        finally:
            self._lock.release()

    def _remove_if_empty(self) -> None:
        journal = read_journal(self._folder) or Journal()
        if MANIFEST in self._folder.names() or journal.files or journal.notes:
            return
        self._folder.remove([], leftovers_of=journal.paths)  # with subfolders that are then empty
        if set(self._folder.names()) <= {LOCK, MARKER, JOURNAL}:
            # The lock is still held, so no other build has begun. One that begins now has a lock file of its own, and
            # its folder is not empty.
            self._folder.remove([JOURNAL])  # before the marker: without it, a journal is that of another program
            self._folder.remove([MARKER, LOCK])
            for path in self._created:
                path.rmdir()

    @property
    def notes(self) -> dict[str, Any]:
        """Small JSON values in the journal, by name: stored by `note` in this build or the one that it resumes."""
        return self._journal.notes

    def note(self, name: str, value: Any) -> None:
        """Store a small JSON value until the manifest is written; `notes` returns it after an interruption."""
        with self._writing():
            self._journal.note(name, value)

    @property
    def kept_note(self) -> PrefillNote | None:
        """The journal's note on the prefill of an interrupted build; None if the note is missing or damaged."""
        return prefill_note(self.notes.get(NOTE))

    def forget_prefill(self) -> None:
        """Remove the unfinished files of an interrupted build's prefill. Called before this build writes a file."""
        with self._writing():
            self._folder.remove([], leftovers_of=self._journal.paths)

    def need_space(self, size: int) -> None:
        """Raise ArtifactError if the disk has fewer than `size` free bytes. Called before the model runs."""
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise self._ways_out.no_space(self.folder, size, free)

    def read_base(self, name: str, device: torch.device = CPU) -> dict[str, torch.Tensor]:
        """Read the tensors of a file of the base (the finished index in the folder) onto a device."""
        assert self.base is not None
        return self._read(name, self.base.files[name], device)

    def is_whole(self, record: FileRecord) -> bool:
        """Whether the file of a record exists and its content has the recorded checksum.

        If not, and if the record is of the base (the finished index in the folder), `newly_damaged` will return its
        path.
        """
        content = record.path, record.sha256
        # Each file is hashed once, because an index may be larger than memory. The size alone is no proof: a build that
        # is killed after the rename and before the journal's update leaves a file of another recipe at the path.
        if content not in self._whole and self.is_there(record):
            with suppress(OSError), self._opened(record) as descriptor:
                if hash_descriptor(descriptor) == record.sha256:
                    self._whole.add(content)
        if content not in self._whole and self.base is not None and record in self.base.files.values():
            self._damaged.setdefault(record.path, False)
        return content in self._whole

    def newly_damaged(self) -> list[str]:
        """Return the paths of files that `is_whole` has found missing or damaged since the last call.

        Only files of the base, the finished index in the folder, are returned.
        """
        new = [path for path, returned in self._damaged.items() if not returned]
        self._damaged |= dict.fromkeys(new, True)
        return new

    def _earlier(self, name: str, recipe: str) -> FileRecord | None:
        """Return the record of an existing, intact file with a recipe; None if there is no such file.

        A file of the interrupted build (in the journal) comes before one of the base, the finished index in the folder.

        Args:
            name: the file's logical name.
            recipe: the hash of everything that determines the file's content.
        """
        records = (self._journal.files.get(name), self.base.files.get(name) if self.base else None)
        return next((one for one in records if one and one.recipe == recipe and self.is_whole(one)), None)

    def is_there(self, record: FileRecord) -> bool:
        """Whether the file of a record exists with the recorded size; the content is not read."""
        with suppress(OSError), self._opened(record) as descriptor:
            return os.fstat(descriptor).st_size == record.bytes
        return False

    def leave_as_it_was(self) -> None:
        """End a build that changes nothing in the finished index: remove the journal and leftover files."""
        assert self.base is not None
        self._remove_strays(self.base)

    def clear_finished(self) -> None:
        """Remove leftovers of a build that was interrupted after it wrote the manifest.

        If an unfinished build can be resumed, nothing is removed.
        """
        assert self.base is not None
        unfinished = any(record not in self.base.files.values() for record in self._journal.files.values())
        if not unfinished and self.kept_note is None:
            self._remove_strays(self.base)

    def _seal(self, manifest: Manifest) -> Manifest:
        """Replace the manifest, and remove files that the new manifest does not list."""
        data, sealed = manifest_bytes(manifest)
        with self._writing():
            self._journal.files = dict(manifest.files)
            self._journal.write()
            self._folder.write(MANIFEST, [data])
        self._remove_strays(sealed)
        self.base, self._journal = sealed, KeptJournal(self._folder, forget=True)
        return sealed

    def _read(self, name: str, record: FileRecord, device: torch.device) -> dict[str, torch.Tensor]:
        what = f"{name} of {self.folder}"
        with self._opened(record) as descriptor:
            return on_device(map_tensors(descriptor, what), descriptor, what, device, {})

    @contextmanager
    def _opened(self, record: FileRecord) -> Iterator[int]:
        descriptor = self._folder.open(record.path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _recover(self) -> None:
        base = None
        try:
            if MANIFEST in self._folder.names():
                base = manifest_in(self._folder)
                check_names(base, self.folder)
                if in_this_form(base):  # an index with an older int8 format is not reused
                    check_layout(base, self.folder)
                self.base = base
        except ArtifactError:
            if not self.force:
                raise
        known = self.base.files if self.base else {}
        # A build that is killed after it wrote the manifest leaves its journal, which then lists the manifest's files.
        earlier = read_journal(self._folder)
        ended = earlier is not None and bool(known) and earlier.files == known
        self._journal = KeptJournal(self._folder, forget=self.force or ended)
        self.unfinished = sum(known.get(name) != record for name, record in self._journal.files.items())
        # Temporary files of a killed build may be as large as the index. Those with complete chunks of a prefill stay.
        note = self.kept_note
        with suppress(OSError):
            self._folder.remove([], leftovers_of=self._journal.paths, kept_number=note.number if note else None)
        if base is not None:
            # The journal must list these paths, so that they can be removed after a new manifest replaces this one.
            self._journal.know(record.path for record in base.files.values())
        with self._writing():
            mark(self._folder)

    def _free_path(self, name: str, recipe: str) -> str:
        """Return the path for a new file: its logical name, or the name with a part of the recipe's hash added.

        The hash is added if the base, the finished index in the folder, has a file at that path.
        """
        in_use = {record.path for record in self.base.files.values()} if self.base else set()
        if name not in in_use:
            return name
        stem, suffix = os.path.splitext(name)
        return f"{stem}.{recipe[:8]}{suffix}"

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an OSError of a write into an ArtifactError with a remedy."""
        try:
            yield
        except OSError as error:
            raise self._ways_out.cannot_write(self.folder, error) from None

    def _remove_strays(self, manifest: Manifest) -> None:
        kept = {record.path for record in manifest.files.values()}
        with self._writing():
            self._folder.remove(self._journal.paths - kept, leftovers_of={*kept, MANIFEST, MARKER})
            # The journal goes last: if this process dies, the next build needs its list of files to remove.
            self._folder.remove([JOURNAL])
