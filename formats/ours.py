"""Which folders a build may write to: empty ones, and indices of sparsekv. Nothing else is ever touched."""

import os
import re
from pathlib import Path

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.folder import Folder
from sparsekv.formats.journal import read_journal
from sparsekv.formats.lock import LOCK
from sparsekv.formats.manifest import is_index
from sparsekv.formats.marker import MARKER, is_marked

_BEFORE_ALL = re.compile(rf"{re.escape(LOCK)}|{re.escape(MARKER)}(\.[0-9a-f]{{8}}\.tmp)?")
"""Files that a build can leave if it dies at its beginning."""


def refuse_foreign(folder: Folder) -> None:
    """Raise ArtifactError for a folder that has files in it but is no index: it has no marker, and no intact manifest
    or journal, by which indices of earlier versions are recognised."""
    others = [name for name in folder.names() if not _BEFORE_ALL.fullmatch(name)]
    if others and not is_marked(folder) and not is_index(folder) and read_journal(folder) is None:
        raise ArtifactError(
            f"{folder.path} is a folder with other things in it ({others[0]}) and no index; name an index in it, such "
            f"as --output {folder.path}/NAME.skv, or another place"
        )


def check_output(path: Path) -> None:
    """Check that an index can be written to a path, before a model is loaded.

    Raises:
        ArtifactError: the path is a file or below one, a folder of other things, or cannot be read or written.
    """
    if os.path.lexists(path):
        if not path.is_dir():
            raise ArtifactError(f"{path} is a file, where an index is a folder; choose another name with --output")
        try:
            refuse_foreign(Folder(path))
        except OSError as error:
            raise ArtifactError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir():
        raise ArtifactError(f"cannot write {path}: {there} is a file, not a folder; choose another name with --output")
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        raise ArtifactError(f"cannot write {path}: permission denied; allow it, or choose another folder with --output")
