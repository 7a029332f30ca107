"""Reads and seals `manifest.json`, the file whose presence means that an index is complete."""

import json
from pathlib import Path

from pydantic import ValidationError

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.errors import ArtifactError, MissingIndexError
from sparsekv.formats.folder import Folder
from sparsekv.formats.hints import build_hint, first_build_hint
from sparsekv.formats.journal import read_journal
from sparsekv.formats.marker import is_marked
from sparsekv.formats.schema import MANIFEST, SCHEMA_VERSION, Manifest

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
        raise ArtifactError(f"cannot read {path}: {_reason(error)}; name an index that you may read") from None


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
        raise ArtifactError(f"cannot read {path}: {_reason(error)}; get permission to read it") from None
    except OSError as error:
        raise ArtifactError(f"{path} is damaged: {_reason(error)}; {_remedy(folder)}") from None


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
    """What to do about a bad manifest: a folder without marker may be another program's, which --force refuses."""
    if is_marked(folder):
        return REBUILD
    return "if it is an index, build it again under another name (--output)"


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _self_hash(fields: dict[str, object]) -> str:
    return hash_json({name: value for name, value in fields.items() if name != "manifest_sha256"})
