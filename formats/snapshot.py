"""A consistent snapshot of an index: its manifest and a descriptor of each of its files, whatever a writer does later.

A writer gives new content a new file, replaces the manifest, and only then removes the files that the old one named.
So if the manifest is unchanged once all files are open, they are its files; open files stay readable without a name.
"""

import os
import resource
import weakref
from contextlib import nullcontext, suppress
from pathlib import Path

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.folder import Folder
from sparsekv.formats.hints import add_methods_hint
from sparsekv.formats.manifest import REBUILD, REPAIR, REPAIR_APPENDED, manifest_data, open_folder, parse_manifest
from sparsekv.formats.schema import FileRecord, Manifest

ATTEMPTS = 100
"""Enough unless a writer finishes about once a millisecond."""
_OTHER_DESCRIPTORS = 256  # spare ones, for what else a process with a model and a GPU opens


class Snapshot:
    """A manifest and its open files.

    Args:
        mending: files of methods may be missing or of another length, and are not open then.

    Raises:
        ArtifactError: no index there, unfinished, newer or damaged, or a file is missing, of another length, no plain
            file, or cannot be read.
    """

    def __init__(self, path: Path, *, mending: bool = False):
        self.folder = open_folder(path)
        self.data = b""
        for _ in range(ATTEMPTS):
            self.data = manifest_data(self.folder)
            self.manifest = parse_manifest(self.data, self.folder)
            _allow_descriptors(len(self.manifest.files))
            try:
                self.descriptors = _open_all(self.folder, self.manifest, mending)
            except ArtifactError:
                if manifest_data(self.folder) == self.data:
                    raise
                continue
            weakref.finalize(self, _close_all, list(self.descriptors.values()))
            if manifest_data(self.folder) == self.data:
                return
        raise ArtifactError(f"{path} is being changed without an end by another process; wait for it, and try again")


def _open_all(folder: Folder, manifest: Manifest, mending: bool) -> dict[str, int]:
    descriptors: dict[str, int] = {}
    try:
        for name, record in manifest.files.items():
            method = next((one for one in manifest.methods if name.startswith(f"{one}/")), None)
            with suppress(ArtifactError) if mending and method else nullcontext():
                descriptors[name] = _open(folder, name, record, _remedy(folder, manifest, method))
    except BaseException:
        _close_all(list(descriptors.values()))
        raise
    return descriptors


def _remedy(folder: Folder, manifest: Manifest, method: str | None) -> str:
    """What to do about a missing file: a method's is built from the others."""
    if method is not None:
        return f"build it again with {add_methods_hint(folder.path, [method])}"
    return REPAIR_APPENDED if manifest.additions else REPAIR


def _open(folder: Folder, name: str, record: FileRecord, remedy: str) -> int:
    try:
        descriptor = folder.open(record.path)
    except FileNotFoundError:
        raise ArtifactError(f"{name} of {folder.path} is missing; {remedy}") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ArtifactError(f"cannot read {name} of {folder.path}: {reason}; mend that, or {REBUILD}") from None
    size = os.fstat(descriptor).st_size
    if size != record.bytes:
        os.close(descriptor)
        change = "truncated" if size < record.bytes else "longer than it was written"
        raise ArtifactError(f"{name} of {folder.path} is {change}: {size} bytes, not {record.bytes}; {remedy}")
    return descriptor


def _allow_descriptors(files: int) -> None:
    """Raise the limit on open files if needed: an index has a file for each layer and method."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    wanted = used + files + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if most < used + files:
            raise ArtifactError(
                f"an index of {files} files cannot be opened by a process that may open {hard}; raise `ulimit -n`"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
