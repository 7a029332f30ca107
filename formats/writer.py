"""Writing an artifact so that no interruption, at any point, leaves a wrong one or loses a good one.

Every file is written to a temporary name, synced and renamed; a journal (`unfinished.json`) remembers the whole
ones with the hash of what decides their content (their recipe); the manifest comes last. A finished index that is
built upon stays valid until the new manifest replaces its own: changed files get a name of their own meanwhile.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors.torch import save

from sparsekv.formats.checksums import hash_bytes, hash_file
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.lock import LOCK, acquire_lock
from sparsekv.formats.manifest import manifest_bytes, read_manifest
from sparsekv.formats.reader import map_tensors
from sparsekv.formats.schema import MANIFEST, FileRecord, Manifest, TensorRecord
from sparsekv.formats.sync import write_atomically

JOURNAL = "unfinished.json"


class ArtifactWriter:
    """One build of one index, held under a lock.

    Args:
        folder: the artifact, `NAME.skv`; created when missing.
        force: reuse nothing; a finished index in the folder still stays valid until `finish`.

    Raises:
        ArtifactError: the folder cannot be written, or another build holds it.
    """

    def __init__(self, folder: Path, *, force: bool = False):
        self.folder = folder
        self.force = force
        self.base: Manifest | None = None
        self.files: dict[str, FileRecord] = {}
        self.notes: dict[str, Any] = {}
        self._journal: dict[str, FileRecord] = {}

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._refuse_other_folders()
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
        self._lock.release()

    def reuse(self, name: str, recipe: str) -> bool:
        """Take over a whole file of an earlier build when the same recipe made it. True when it was there."""
        if self.force and name not in self.files:
            return False
        for known in (self.files, self._journal, self.base.files if self.base else {}):
            record = known.get(name)
            if record and record.recipe == recipe and self._is_whole(record):
                self.files[name] = record
                return True
        return False

    def write(self, name: str, tensors: Mapping[str, torch.Tensor], recipe: str) -> None:
        """Write one logical file atomically and remember it in the journal. Allocates one copy of the tensors."""
        path = self._free_path(name, recipe)
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        data = save(tensors)
        self._write_atomically(path, data)
        self.files[name] = FileRecord(
            path=path,
            bytes=len(data),
            sha256=hash_bytes(data),
            recipe=recipe,
            tensors={
                key: TensorRecord(shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
                for key, tensor in tensors.items()
            },
        )
        self._write_journal()

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors of a file that this build has written or taken over."""
        return map_tensors(self.folder / self.files[name].path)

    def read_base(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors of a file of the finished index that is being built upon."""
        assert self.base is not None
        return map_tensors(self.folder / self.base.files[name].path)

    def leave_as_it_was(self) -> None:
        """End a build that changed nothing."""
        self._remove_strays()

    def note(self, name: str, value: Any) -> None:
        """Remember a small JSON value until the manifest is written; `notes` gives it back after an interruption."""
        self.notes[name] = value
        self._write_journal()

    def need_space(self, size: int) -> None:
        """Raise ArtifactError when the disk has less than `size` free bytes, before hours of work are spent."""
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise ArtifactError(
                f"{self.folder} needs {size / 1e6:.0f} MB and its disk has {free / 1e6:.0f} MB free; "
                "make room, choose another folder with --output, or shorten the document with --max-tokens"
            )

    def finish(self, manifest: Manifest) -> Manifest:
        """Seal the index: the manifest replaces the earlier one, and files that nothing names are removed."""
        data, sealed = manifest_bytes(manifest.model_copy(update={"files": self.files}))
        self._write_atomically(MANIFEST, data)
        self._remove_strays()
        self.base, self._journal = sealed, {}
        return sealed

    def _recover(self) -> None:
        if (self.folder / MANIFEST).exists():
            try:
                self.base = read_manifest(self.folder)
            except ArtifactError:
                if not self.force:
                    raise
        if not self.force:
            self._read_journal()
        self._write_journal()

    def _refuse_other_folders(self) -> None:
        """An index may only go where nothing else is: finishing removes files that the manifest does not name."""
        others = [path.name for path in self.folder.iterdir() if path.name != LOCK]
        if others and MANIFEST not in others and not any(name.startswith(JOURNAL) for name in others):
            raise ArtifactError(
                f"{self.folder} is a folder with other things in it ({others[0]}); choose another name with --output"
            )

    def _read_journal(self) -> None:
        try:
            journal = json.loads((self.folder / JOURNAL).read_bytes())
            files = {name: FileRecord.model_validate(record) for name, record in journal["files"].items()}
            notes = dict(journal["notes"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return  # no journal, or none that this version can read: there is nothing to resume
        self._journal, self.notes = files, notes

    def _write_journal(self) -> None:
        records = {**self._journal, **self.files}
        files = {name: record.model_dump() for name, record in records.items()}
        self._write_atomically(JOURNAL, json.dumps({"files": files, "notes": self.notes}).encode())

    def _is_whole(self, record: FileRecord) -> bool:
        # The sum, not only the size: a kill between a rename and the journal leaves another recipe's file there.
        path = self.folder / record.path
        return path.is_file() and path.stat().st_size == record.bytes and hash_file(path) == record.sha256

    def _free_path(self, name: str, recipe: str) -> str:
        """The logical name itself, unless the finished index that is being built upon still needs it."""
        in_use = {record.path for record in self.base.files.values()} if self.base else set()
        if name not in in_use:
            return name
        stem, suffix = os.path.splitext(name)
        return f"{stem}.{recipe[:8]}{suffix}"

    def _write_atomically(self, path: str, data: bytes) -> None:
        try:
            write_atomically(self.folder / path, data)
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> ArtifactError:
        reason = (error.strerror or str(error)).lower()
        return ArtifactError(
            f"cannot write {self.folder}: {reason}; make room or permission there, or choose another folder "
            "with --output, and run the same command again"
        )

    def _remove_strays(self) -> None:
        kept = {self.folder / record.path for record in self.files.values()}
        for path in [*self.folder.rglob("*.safetensors"), *self.folder.rglob("*.tmp"), self.folder / JOURNAL]:
            if path not in kept:
                path.unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
