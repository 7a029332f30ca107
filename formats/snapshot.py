"""One moment of an index, kept: its manifest, and a descriptor of each of its files, however a writer goes on.

A writer gives new content a new file, replaces the manifest, and only then removes the files that the old one named.
So when all files are open and the manifest is still the same, they are this manifest's; open files outlive their names.
"""

import os
import resource
import weakref
from pathlib import Path

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.folder import Folder
from sparsekv.formats.manifest import REBUILD, manifest_data, open_folder, parse_manifest
from sparsekv.formats.schema import FileRecord, Manifest

ATTEMPTS = 100
"""A writer that finishes once a millisecond would be needed to use them up."""
_OTHER_DESCRIPTORS = 256  # what else a process with a model and a GPU has open


class Snapshot:
    """A manifest and its open files.

    Raises:
        ArtifactError: no index there, unfinished, newer or damaged, or a file is missing, of another length, no plain
            file, or cannot be read.
    """

    def __init__(self, path: Path):
        self.folder = open_folder(path)
        self.data = b""
        for _ in range(ATTEMPTS):
            self.data = manifest_data(self.folder)
            self.manifest = parse_manifest(self.data, self.folder)
            _allow_descriptors(len(self.manifest.files))
            try:
                self.descriptors = _open_all(self.folder, self.manifest)
            except ArtifactError:
                if manifest_data(self.folder) == self.data:
                    raise
                continue
            weakref.finalize(self, _close_all, list(self.descriptors.values()))
            if manifest_data(self.folder) == self.data:
                return
        raise ArtifactError(f"{path} is being changed without an end by another process; wait for it, and try again")


def _open_all(folder: Folder, manifest: Manifest) -> dict[str, int]:
    descriptors: dict[str, int] = {}
    try:
        for name, record in manifest.files.items():
            descriptors[name] = _open(folder, name, record)
    except BaseException:
        _close_all(list(descriptors.values()))
        raise
    return descriptors


def _open(folder: Folder, name: str, record: FileRecord) -> int:
    try:
        descriptor = folder.open(record.path)
    except FileNotFoundError:
        raise ArtifactError(f"{name} of {folder.path} is missing; {REBUILD}") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ArtifactError(f"cannot read {name} of {folder.path}: {reason}; mend that, or {REBUILD}") from None
    size = os.fstat(descriptor).st_size
    if size != record.bytes:
        os.close(descriptor)
        change = "truncated" if size < record.bytes else "longer than it was written"
        raise ArtifactError(f"{name} of {folder.path} is {change}: {size} bytes, not {record.bytes}; {REBUILD}")
    return descriptor


def _allow_descriptors(files: int) -> None:
    """A file for each layer and method can be more than a process may have open unless it asks."""
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
