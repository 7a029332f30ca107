"""Writes the setting that an index is used with by default; only the manifest changes."""

import os
from pathlib import Path

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.lock import acquire_lock
from sparsekv.formats.manifest import manifest_bytes, manifest_in, open_folder
from sparsekv.formats.schema import MANIFEST, Defaults, Manifest


def refuse_unwritable(folder: Path) -> None:
    """Raise ArtifactError for an index whose manifest cannot be replaced; called before measuring starts."""
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise ArtifactError(f"cannot write {folder}: permission denied; allow it, or measure alone with --dry-run")


def write_defaults(folder: Path, base: Manifest, defaults: Defaults | None) -> Manifest:
    """Replace the manifest of a finished index by one with these defaults or none, atomically, holding its lock.

    Identity and files do not change; an interrupted build can still be resumed.

    Args:
        base: the manifest of the index that the defaults were measured on.

    Returns:
        The sealed manifest.

    Raises:
        ArtifactError: the index is gone, was replaced, is being built by another process, or cannot be written.
    """
    opened = open_folder(folder)
    manifest_in(opened)  # before the lock, which would create its file in any folder
    try:
        lock = acquire_lock(folder)
        try:
            manifest = manifest_in(opened)
            if manifest.uuid != base.uuid:
                raise ArtifactError(f"{folder} was changed meanwhile by another process; run the same command again")
            data, sealed = manifest_bytes(manifest.model_copy(update={"defaults": defaults}))
            opened.write(MANIFEST, [data])
            opened.remove([], leftovers_of=[MANIFEST])
        finally:
            lock.release()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ArtifactError(f"cannot write {folder}: {reason}; make room or permission there") from None
    return sealed
