"""`manifest.json`, whose presence means that an index is complete: reading, sealing and defaults, and the journal of an
unfinished build."""

import json
import math
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.errors import ArtifactError, MissingIndexError, reason_of
from sparsekv.formats.hints import build_hint, first_build_hint
from sparsekv.formats.index.folder import Folder, acquire_lock, is_marked
from sparsekv.formats.index.schema import (
    MANIFEST,
    SCHEMA_VERSION,
    Defaults,
    FileName,
    FileRecord,
    KVDtype,
    Manifest,
    Probe,
)

PROBE_LOGITS = 32

# Largest difference of a probe's logits, relative to the largest logit, that rounding can cause.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}

# The same for what storing in 8 bits changes: 0.003 for the embedded model over 6,144 tokens, at most 0.02 for random
# models of every family. Other weights are further off: 0.15 where each of the embedded model's is off by 10% of their
# standard deviation (docs/reference/eight-bits.md).
STORING_TOLERANCE: dict[KVDtype, float] = {"int8": 5e-2}


def top_logits(logits: torch.Tensor) -> Probe:
    """The PROBE_LOGITS highest of a token's finite logits [vocabulary]."""
    top = logits.topk(min(PROBE_LOGITS, len(logits)))
    return Probe(token_ids=top.indices.tolist(), logits=top.values.tolist())


def difference(probe: Probe, logits: torch.Tensor) -> float:
    """The largest difference of logits [vocabulary] from a probe's, relative to the probe's largest; may be NaN, and is
    infinite where the probe names tokens beyond the vocabulary."""
    if max(probe.token_ids) >= len(logits):
        return math.inf
    stored = torch.tensor(probe.logits)
    return float((logits[probe.token_ids] - stored).abs().max() / stored.abs().max())


def probe_tolerance(manifest: Manifest, dtype: torch.dtype, *, over_exact: bool) -> float:
    """Largest difference of logits over an index's rows from the stored ones, for the same model in a dtype.

    Args:
        over_exact: the stored logits are those over the rows before they were rounded to 8 bits.
    """
    rounding = max(PROBE_TOLERANCE[dtype], PROBE_TOLERANCE[_dtype(manifest.dtype)])
    if manifest.kv_storage is None or not over_exact:
        return rounding
    return max(rounding, STORING_TOLERANCE[manifest.kv_storage.dtype])


def is_over_exact(manifest: Manifest) -> bool:
    """Whether the logits of probe and canary are those over the rows before they were rounded to 8 bits."""
    return manifest.kv_storage is not None and manifest.kv_storage.exact_probe


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


JOURNAL = "unfinished.json"
_MOST = 64 << 20

_FILES = TypeAdapter(dict[FileName, FileRecord])
_PATHS = TypeAdapter(set[FileName])


@dataclass
class Journal:
    """Records of whole files by logical name; every path that the index has or had, or that a build began to write; and
    notes, small JSON values that a build stores for when it is resumed."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)
    notes: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The journal as it is stored on disk."""
        files = {name: record.model_dump() for name, record in self.files.items()}
        return json.dumps({"files": files, "paths": sorted(self.paths), "notes": self.notes}).encode()


def read_journal(folder: Folder) -> Journal | None:
    """The journal in a folder; None where there is none that this version can read."""
    try:
        stored = json.loads(folder.read(JOURNAL, _MOST))
        files = _FILES.validate_python(stored["files"])
        # An older version's journal has no paths: the files that it recorded are all that it wrote.
        paths = _PATHS.validate_python(stored.get("paths", []))
        notes = dict(stored["notes"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, ValidationError):
        return None
    return Journal(files, paths | {record.path for record in files.values()}, notes)


class KeptJournal(Journal):
    """The journal of a build under way, on disk after every change; threads may change it.

    What changes it raises OSError where it cannot be written.

    Args:
        folder: it resumes the journal that an interrupted build left there.
        forget: of that one it knows the paths alone.
    """

    def __init__(self, folder: Folder, *, forget: bool):
        earlier = read_journal(folder) or Journal()
        super().__init__({} if forget else earlier.files, earlier.paths, {} if forget else earlier.notes)
        self._folder, self._guard = folder, threading.RLock()

    def know(self, paths: Iterable[str]) -> None:
        """Know more paths when it is written next."""
        with self._guard:
            self.paths.update(paths)

    def name(self, path: str) -> str:
        """A path, once the journal on disk has it."""
        with self._guard:
            if path not in self.paths:
                self.paths.add(path)
                self.write()
        return path

    def reuse(self, name: str, record: FileRecord) -> None:
        """Have a whole file of an earlier build in it when it is written next."""
        with self._guard:
            self.files[name] = record

    def add(self, name: str, record: FileRecord) -> None:
        """Have a file in it that is whole."""
        with self._guard:
            self.files[name] = record
            self.write()

    def note(self, name: str, value: Any) -> None:
        """Have a note in it."""
        with self._guard:
            self.notes[name] = value
            self.write()

    def write(self) -> None:
        """Write all that is known."""
        with self._guard:
            self._folder.write(JOURNAL, [self.to_bytes()])


MOST_BYTES = 256 << 20
REBUILD = "build the index again from its document, with --force"
REPAIR = "build the index again from its document, which writes anew what is missing"
REPAIR_APPENDED = "build the index again from its document, with --force, and append again what was appended"


def manifest_bytes(manifest: Manifest) -> tuple[bytes, Manifest]:
    """Seal a manifest with the hash of all its other fields; returns its JSON bytes and the sealed manifest."""
    sealed = manifest.model_copy(update={"manifest_sha256": _self_hash(manifest.model_dump(mode="json"))})
    return json.dumps(sealed.model_dump(mode="json"), indent=1).encode(), sealed


def open_folder(path: Path) -> Folder:
    """Open the folder of an index.

    Raises:
        MissingIndexError: there is no such folder.
        ArtifactError: it cannot be read.
    """
    try:
        return Folder(path)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingIndexError(f"no index at {path}; {build_hint(path)}") from None
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {reason_of(error)}; name an index that you may read") from None


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of the index in a folder.

    Raises:
        ArtifactError: the folder is no index, is unfinished, was written by a newer version, is damaged or cannot be
            read.
    """
    return manifest_in(open_folder(path))


def manifest_in(folder: Folder) -> Manifest:
    """`read_manifest` for an open folder."""
    return parse_manifest(manifest_data(folder), folder)


def manifest_data(folder: Folder) -> bytes:
    """The manifest's bytes. Raises ArtifactError as `read_manifest` does."""
    path = folder.path / MANIFEST
    try:
        return folder.read(MANIFEST, MOST_BYTES)
    except FileNotFoundError:
        if is_marked(folder) or read_journal(folder) is not None:
            raise ArtifactError(
                f"{folder.path} is unfinished: {MANIFEST} is missing; run the same build-index command again to resume"
            ) from None
        raise MissingIndexError(
            f"{folder.path} is a folder, but no index: {MANIFEST} is missing; name an index, or {first_build_hint()}"
        ) from None
    except PermissionError as error:
        raise ArtifactError(f"cannot read {path}: {reason_of(error)}; get permission to read it") from None
    except OSError as error:
        raise ArtifactError(f"{path} is damaged: {reason_of(error)}; {_remedy(folder)}") from None


def parse_manifest(data: bytes, folder: Folder) -> Manifest:
    """Check and parse a manifest's bytes, read from `folder`. Raises ArtifactError as `read_manifest` does."""
    path = folder.path / MANIFEST
    try:
        fields = json.loads(data)
        least = fields["least_reader_version"]
        newer, intact = least > SCHEMA_VERSION, fields.get("manifest_sha256") == _self_hash(fields)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"{path} is damaged ({type(error).__name__}); {_remedy(folder)}") from None
    if newer:
        raise ArtifactError(
            f"{path} has schema {fields.get('schema_version')} and needs a reader of schema {least}, this version "
            f"reads up to {SCHEMA_VERSION}; upgrade sparsekv"
        )
    if not intact:
        raise ArtifactError(f"{path} was changed since it was written: its own hash does not match; {_remedy(folder)}")
    try:
        return Manifest.model_validate(fields)
    except (ValidationError, RecursionError) as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"]) if isinstance(error, ValidationError) else "?"
        raise ArtifactError(f"{path} is damaged: field {where[:200]} is not valid; {_remedy(folder)}") from None


def is_index(folder: Folder) -> bool:
    """Whether a folder has an unchanged manifest of sparsekv, of any version."""
    try:
        fields = json.loads(folder.read(MANIFEST, MOST_BYTES))
        return bool(fields["manifest_sha256"] == _self_hash(fields))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def _remedy(folder: Folder) -> str:
    """A remedy for a bad manifest: a folder without marker may be another program's, which --force refuses."""
    if is_marked(folder):
        return REBUILD
    return "if it is an index, build it again under another name (--output)"


def _self_hash(fields: dict[str, object]) -> str:
    return hash_json({name: value for name, value in fields.items() if name != "manifest_sha256"})


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
        raise ArtifactError(f"cannot write {folder}: {reason_of(error)}; make room or permission there") from None
    return sealed
