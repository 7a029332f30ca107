"""Read, seal and update `manifest.json`, whose presence means that an index is complete.

Also reads and writes the journal of an unfinished build.
"""

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
from sparsekv.formats.errors import (
    REBUILD,
    ArtifactError,
    MissingIndexError,
    build_hint,
    first_build_hint,
    reason_of,
    with_ending,
)
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

# Largest difference from a stored logit that still counts as rounding, relative to the largest stored logit.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
COARSEST = torch.bfloat16
"""Dtype whose tolerance a model with quantised weights gets, whatever its own dtype is.

Some quantisation methods also round activations to 8 bits.
"""

# Largest difference of a logit that still counts as rounding by int8 storage, relative to the largest. Measured
# (docs/reference/eight-bits.md): 0.003 for the embedded model over 6,168 tokens, at most 0.02 for random models of
# every family. With other weights than those of the index, logits differ more: by 0.05 with noise of 3% of the
# weights' standard deviation, by 0.15 with 10%.
STORING_TOLERANCE: dict[KVDtype, float] = {"int8": 5e-2}


def top_logits(logits: torch.Tensor) -> Probe:
    """Return the `PROBE_LOGITS` highest of a token's logits [vocabulary], all of which must be finite."""
    top = logits.topk(min(PROBE_LOGITS, len(logits)))
    return Probe(token_ids=top.indices.tolist(), logits=top.values.tolist())


def difference(probe: Probe, logits: torch.Tensor) -> float:
    """Compute the largest difference between logits [vocabulary] and a probe, the highest logits stored for a token.

    The difference is divided by the probe's largest magnitude. It may be NaN, and is infinite if the probe has token
    ids beyond the vocabulary.
    """
    if max(probe.token_ids) >= len(logits):
        return math.inf
    stored = torch.tensor(probe.logits)
    return float((logits[probe.token_ids] - stored).abs().max() / stored.abs().max())


def probe_tolerance(manifest: Manifest, dtype: torch.dtype, *, over_exact: bool) -> float:
    """Return the largest relative difference from an index's stored logits that is accepted, for a model in a dtype.

    Args:
        over_exact: the stored logits were computed over exact keys and values, before their rounding to int8.
    """
    rounding = max(PROBE_TOLERANCE[dtype], PROBE_TOLERANCE[_dtype(manifest.dtype)])
    if manifest.model.quantisation is not None:
        rounding = max(rounding, PROBE_TOLERANCE[COARSEST])
    if manifest.kv_storage is None or not over_exact:
        return rounding
    return max(rounding, STORING_TOLERANCE[manifest.kv_storage.dtype])


ROW_TOLERANCE = 4
"""Tolerance of a token's keys, values and states, divided by the tolerance of logits. Both are relative.

It is above 1 because rounding errors add up over layers.
"""


def is_over_exact(manifest: Manifest) -> bool:
    """Whether keys and values are stored in int8, and the index's stored logits were computed before this rounding."""
    return manifest.kv_storage is not None and manifest.kv_storage.exact_probe


def why_logits_differ(manifest: Manifest) -> str:
    """Return the possible causes of logits that differ from the stored ones, and the model to use instead.

    Int8 storage is a possible cause only if the stored logits were computed before the rounding to int8. `convert`
    leaves such logits, because it runs no model.
    """
    over_exact = is_over_exact(manifest)
    rounding = "int8 storage changes this model's logits too much, or " if over_exact else ""
    states = ", or other states" if manifest.states else ""
    unrounded = "use the index that was converted, or " if over_exact else "use "
    return (
        f"{rounding}the model has other weights{states}, or masks other tokens, than the model of the index: "
        f"{unrounded}the model that the index was built with (--model {manifest.model.id})"
    )


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
    """The journal of a build, from which an interrupted build is resumed.

    Args:
        files: records of complete files by logical name.
        paths: every path that the index has or had, or that a build has begun to write.
        notes: small JSON values that a build stores.
    """

    files: dict[str, FileRecord] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)
    notes: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Encode the journal as the JSON that is stored on disk."""
        files = {name: record.model_dump() for name, record in self.files.items()}
        return json.dumps({"files": files, "paths": sorted(self.paths), "notes": self.notes}).encode()


def read_journal(folder: Folder) -> Journal | None:
    """Read the journal in a folder; None if there is no journal, or this version cannot read it."""
    try:
        stored = json.loads(folder.read(JOURNAL, _MOST))
        files = _FILES.validate_python(stored["files"])
        # A journal of an older version has no paths. Its recorded files are all that its build wrote.
        paths = _PATHS.validate_python(stored.get("paths", []))
        notes = dict(stored["notes"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, ValidationError):
        return None
    return Journal(files, paths | {record.path for record in files.values()}, notes)


class KeptJournal(Journal):
    """The journal of a running build, which any thread may change.

    `name` (for a new path), `add` and `note` write the journal to disk at once. Changes by `know` and `reuse` reach the
    disk with the next write. A write that fails raises OSError.

    Args:
        folder: the index's folder. A journal that an interrupted build left there is continued.
        forget: keep only the paths of that journal.
    """

    def __init__(self, folder: Folder, *, forget: bool):
        earlier = read_journal(folder) or Journal()
        super().__init__({} if forget else earlier.files, earlier.paths, {} if forget else earlier.notes)
        self._folder, self._guard = folder, threading.RLock()

    def know(self, paths: Iterable[str]) -> None:
        """Add paths to the journal, which the next write stores on disk."""
        with self._guard:
            self.paths.update(paths)

    def name(self, path: str) -> str:
        """Add a path, write the journal to disk if the path is new, and return the path."""
        with self._guard:
            if path not in self.paths:
                self.paths.add(path)
                self.write()
        return path

    def reuse(self, name: str, record: FileRecord) -> None:
        """Add the record of a complete file of an earlier build, which the next write stores on disk."""
        with self._guard:
            self.files[name] = record

    def add(self, name: str, record: FileRecord) -> None:
        """Add the record of a complete file, and write the journal to disk."""
        with self._guard:
            self.files[name] = record
            self.write()

    def note(self, name: str, value: Any) -> None:
        """Store a note, and write the journal to disk."""
        with self._guard:
            self.notes[name] = value
            self.write()

    def forget(self, name: str) -> None:
        """Remove a note, and write the journal to disk if it had the note."""
        with self._guard:
            if self.notes.pop(name, None) is not None:
                self.write()

    def write(self) -> None:
        """Write the journal to disk."""
        with self._guard:
            self._folder.write(JOURNAL, [self.to_bytes()])


MOST_BYTES = 256 << 20
REPAIR = "build the index again from its document, which writes anew what is missing or damaged"
REPAIR_APPENDED = "build the index again from its document, with --force, and append again what was appended"


def manifest_bytes(manifest: Manifest) -> tuple[bytes, Manifest]:
    """Seal a manifest with the hash of all its other fields; return its JSON bytes and the sealed manifest."""
    sealed = manifest.model_copy(update={"manifest_sha256": _self_hash(manifest.model_dump(mode="json"))})
    return json.dumps(sealed.model_dump(mode="json"), indent=1).encode(), sealed


def open_folder(path: Path) -> Folder:
    """Open the folder of an index.

    Raises:
        MissingIndexError: the folder does not exist.
        ArtifactError: the folder cannot be read.
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
        MissingIndexError: the folder does not exist or is no index.
        ArtifactError: the index is unfinished, was written by a newer version, is damaged or cannot be read.
    """
    return manifest_in(open_folder(path))


def manifest_in(folder: Folder) -> Manifest:
    """Read and check the manifest in an open folder, as `read_manifest` does for a path."""
    return parse_manifest(manifest_data(folder), folder)


def _index_of(documents: Path) -> str:
    """Return a hint for a folder that is no index: to name FOLDER.skv if that is an index, else how to build one."""
    named = documents if documents.name else documents.absolute()  # `.` has no name
    if named.name and ((beside := with_ending(named)) / MANIFEST).is_file():
        return f"name the index beside it, {beside}"
    return f"name an index, or {first_build_hint()}"


def manifest_data(folder: Folder) -> bytes:
    """Read the manifest's bytes. Raises the errors of `read_manifest`."""
    path = folder.path / MANIFEST
    try:
        return folder.read(MANIFEST, MOST_BYTES)
    except FileNotFoundError:
        if is_marked(folder) or read_journal(folder) is not None:
            raise ArtifactError(
                f"{folder.path} is unfinished: {MANIFEST} is missing; run the same build-index command again to resume"
            ) from None
        raise MissingIndexError(
            f"{folder.path} is a folder, but no index: {MANIFEST} is missing; {_index_of(folder.path)}"
        ) from None
    except PermissionError as error:
        raise ArtifactError(f"cannot read {path}: {reason_of(error)}; make it readable") from None
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
            f"{path} has schema {fields.get('schema_version')} and needs a reader of schema {least}, and this "
            f"version reads up to {SCHEMA_VERSION}; upgrade sparsekv"
        )
    if not intact:
        raise ArtifactError(f"{path} was changed since it was written: its own hash does not match; {_remedy(folder)}")
    try:
        return Manifest.model_validate(fields)
    except (ValidationError, RecursionError) as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"]) if isinstance(error, ValidationError) else "?"
        raise ArtifactError(f"{path} is damaged: field {where[:200]} is not valid; {_remedy(folder)}") from None


def is_index(folder: Folder) -> bool:
    """Whether a folder has a manifest of sparsekv, of any version, whose own hash matches."""
    try:
        fields = json.loads(folder.read(MANIFEST, MOST_BYTES))
        return bool(fields["manifest_sha256"] == _self_hash(fields))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def _remedy(folder: Folder) -> str:
    """Return a remedy for a bad manifest.

    In a folder with the marker file the remedy is --force. A folder without it may belong to another program, and
    --force refuses such a folder, so the remedy is another name.
    """
    if is_marked(folder):
        return REBUILD
    return "if it is an index, build it again under another name (--output)"


def _self_hash(fields: dict[str, object]) -> str:
    return hash_json({name: value for name, value in fields.items() if name != "manifest_sha256"})


def refuse_unwritable(folder: Path, remedy: str) -> None:
    """Raise ArtifactError, with this remedy, if an index's manifest cannot be replaced."""
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise ArtifactError(f"cannot write {folder}: permission denied; {remedy}")


def write_defaults(folder: Path, base: Manifest, defaults: Defaults | None) -> Manifest:
    """Set or remove the defaults in a finished index's manifest, which is replaced atomically under the index's lock.

    The index's identity and files do not change. An interrupted build can still be resumed.

    Args:
        base: the manifest of the index that the defaults were measured on.

    Returns:
        The sealed manifest.

    Raises:
        ArtifactError: the index is gone or damaged, was replaced, is being built by another process, or cannot be
            written.
    """
    opened = open_folder(folder)
    manifest_in(opened)  # checked before the lock, which would create its file even in a folder that is no index
    try:
        lock = acquire_lock(folder)
        try:
            manifest = manifest_in(opened)
            if manifest.uuid != base.uuid:
                raise ArtifactError(
                    f"another process changed {folder} while this command ran; run the same command again"
                )
            data, sealed = manifest_bytes(manifest.model_copy(update={"defaults": defaults}))
            opened.write(MANIFEST, [data])
            opened.remove([], leftovers_of=[MANIFEST])
        finally:
            lock.release()
    except OSError as error:
        raise ArtifactError(
            f"cannot write {folder}: {reason_of(error)}; free space or get permission to write there"
        ) from None
    return sealed
