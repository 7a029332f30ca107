"""Copy an index to extend the copy; the copy gets its name only when it is complete."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparsekv.formats.folder import Folder
from sparsekv.formats.marker import mark
from sparsekv.formats.reader import Artifact
from sparsekv.formats.schema import MANIFEST
from sparsekv.indexing.partial_folder import cannot_write, partial_folder

PIECE = 16 << 20


@contextmanager
def copied_index(artifact: Artifact, folder: Path) -> Iterator[Path]:
    """Yields a copy of an index as it was when opened; on success the copy is renamed to `folder`, else removed.

    The files are hard links where the file system allows it: files of an index are replaced, never changed in place.
    Copies that killed processes left behind are removed first.

    Raises:
        ArtifactError: the folder exists or cannot be written.
    """
    try:
        with partial_folder(folder) as unfinished:
            copy = Folder(unfinished)
            mark(copy)
            for name, record in artifact.manifest.files.items():
                _copy(artifact.descriptor(name), copy, record.path)
            copy.write(MANIFEST, [artifact.manifest_data])
            yield unfinished
    except OSError as error:
        raise cannot_write(folder, error) from None


def _copy(descriptor: int, folder: Folder, path: str) -> None:
    try:
        folder.link(descriptor, path)
    except OSError:
        folder.write(path, _pieces(descriptor))


def _pieces(descriptor: int) -> Iterator[bytes]:
    place = 0
    while piece := os.pread(descriptor, PIECE, place):
        yield piece
        place += len(piece)
