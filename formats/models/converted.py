"""Folder of a converted model in the cache. Checksums of its files show whether the folder is complete."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from logging import CRITICAL
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError

from sparsekv.formats.checksums import hash_file
from sparsekv.formats.errors import SparsekvError, reason_of
from sparsekv.formats.index.folder import sync_path
from sparsekv.formats.user.cache import read_small, replace_small

SUMS = "sha256.json"


def damaged_files(folder: Path, *, full: bool) -> list[str]:
    """Return the names of missing or changed files in a converted model's folder.

    If the file of checksums itself is missing or damaged, only its name is returned.

    Args:
        full: recompute the sha256 of all files; False: only of files with a new modification time.
    """
    try:
        sums = _read_sums(folder)
        damaged = [name for name, entry in sums.items() if not _is_whole(folder / name, entry, full)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return [SUMS]
    return damaged if sums else [SUMS]


def _read_sums(folder: Path) -> dict[str, dict[str, str | int]]:
    sums: dict[str, dict[str, str | int]] = json.loads(read_small(folder / SUMS) or "{}")
    return sums


def _is_whole(path: Path, entry: dict[str, str | int], full: bool) -> bool:
    if not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    as_sealed = not full and path.stat().st_mtime_ns == entry.get("mtime_ns")
    return as_sealed or hash_file(path) == entry["sha256"]


def note_times(folder: Path) -> None:
    """Store the modification times of a folder's files, so that unchanged files are not hashed again.

    Write errors are ignored.
    """
    sums = _read_sums(folder)
    with contextlib.suppress(OSError):  # another process may be replacing the folder
        noted = {name: {**entry, "mtime_ns": (folder / name).stat().st_mtime_ns} for name, entry in sums.items()}
        if noted != sums:
            replace_small(folder / SUMS, json.dumps(noted, indent=2) + "\n")


def whole_folder(folder: Path, make: Callable[[Path, list[str]], None], *, full_check: bool = False) -> Path:
    """Return a converted model's folder. If the folder is missing or damaged, it is made first.

    One process at a time makes the folder, and other processes wait.

    Args:
        make: called with the folder and the names of its damaged files; makes the folder.
        full_check: recompute all checksums, not only of files with a new modification time.

    Raises:
        SparsekvError: the folder cannot be written. Also raises the errors of `make`.
    """
    if not damaged_files(folder, full=full_check):
        note_times(folder)
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if damaged := damaged_files(folder, full=full_check):
                make(folder, damaged)
    except (OSError, SafetensorError) as error:
        raise SparsekvError(
            f"cannot write the folder of converted models, {folder.parent}: {reason_of(error)}; free space or get "
            "permission to write there, or set SPARSEKV_CACHE to another folder"
        ) from None
    return folder


def clear(path: Path) -> None:
    # rmtree opens the path, which would block on a named pipe.
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def seal(folder: Path) -> None:
    """Make a folder's files readable for all users, write the file of their checksums, and flush all to disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        path.chmod(0o644)
    sums = {
        str(path.relative_to(folder)): {
            "bytes": path.stat().st_size,
            "mtime_ns": path.stat().st_mtime_ns,
            "sha256": hash_file(path),
        }
        for path in files
    }
    (folder / SUMS).write_text(json.dumps(sums, indent=2) + "\n")
    for path in [*files, folder / SUMS, folder]:
        sync_path(path)


@contextlib.contextmanager
def silent_transformers() -> Iterator[None]:
    """Hide transformers' warnings and progress bars within the context. Errors are still raised."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
