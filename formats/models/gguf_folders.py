"""Find the folder of a GGUF file's converted model in the cache. The folder's name depends on the file's content."""

import contextlib
import json
from pathlib import Path
from typing import Any

from sparsekv.formats.checksums import hash_file, hash_json
from sparsekv.formats.errors import SparsekvError, reason_of
from sparsekv.formats.models.converted import damaged_files
from sparsekv.formats.user.cache import cache_root, read_small, replace_small

FORM = 6
"""Version of the code that converts files, in `gguf.py`. Increase the version when a file would be converted otherwise
or refused."""


def folder_of(path: Path, name: str) -> Path:
    """Return the folder of a GGUF file's converted model, whether it exists or not.

    Args:
        name: the model's name as the user gave it, for errors.

    Raises:
        SparsekvError: the file cannot be read.
    """
    return _folder(path, _checksum(path, name))


def converted_before(path: Path) -> Path | None:
    """Return the folder of a GGUF file's converted model; None if the file was not converted, or has changed since.

    The file itself is not read.
    """
    try:
        checksum = _stored_checksum(path)
    except OSError:
        return None
    folder = None if checksum is None else _folder(path, checksum)
    return None if folder is None or damaged_files(folder, full=False) else folder


def _parent() -> Path:
    return cache_root() / "models" / "gguf"


def _folder(path: Path, checksum: str) -> Path:
    return _parent() / f"{path.stem}-{hash_json([FORM, checksum])[:16]}"


def _checksum(path: Path, name: str) -> str:
    """Return the file's sha256. The result is cached until the file or one of its times changes.

    Raises SparsekvError if the file cannot be read.
    """
    try:
        state = _state(path)
        checksum = _stored_checksum(path)
        if checksum is not None:
            return checksum
        checksum = hash_file(path)
    except OSError as error:
        raise SparsekvError(
            f"model '{name}' cannot be read: {reason_of(error)}; make it readable, or name another model"
        ) from None
    known = _parent() / "checksums.json"
    stored: Any = {}
    with contextlib.suppress(ValueError, RecursionError):
        stored = json.loads(read_small(known) or "{}")
    added = {str(path.resolve()): [*state, checksum]}
    replace_small(known, json.dumps((stored if isinstance(stored, dict) else {}) | added))
    return checksum


def _stored_checksum(path: Path) -> str | None:
    """Return the cached sha256 of a file; None if there is none, or the file or one of its times has changed since.

    Raises OSError if the file or the cache cannot be read.
    """
    state = _state(path)
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):
        *before, checksum = json.loads(read_small(_parent() / "checksums.json") or "{}")[str(path.resolve())]
        if before == state and isinstance(checksum, str):
            return checksum
    return None


def _state(path: Path) -> list[int]:
    """Return what changes with a file's content.

    The inode's change time belongs to it: unpacking an archive may replace a file's content but keep its size and
    modification time.
    """
    found = path.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
