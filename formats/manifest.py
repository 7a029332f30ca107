"""Reading and sealing `manifest.json`: the one file whose presence says that an index is whole."""

import json
from pathlib import Path

from pydantic import ValidationError

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.schema import MANIFEST, SCHEMA_VERSION, Manifest


def manifest_bytes(manifest: Manifest) -> tuple[bytes, Manifest]:
    """Serialise a manifest with the hash of all its other fields; returns the bytes and the sealed manifest."""
    sealed = manifest.model_copy(update={"manifest_sha256": _self_hash(manifest.model_dump(mode="json"))})
    return json.dumps(sealed.model_dump(mode="json"), indent=1).encode(), sealed


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of an index.

    Raises:
        ArtifactError: the folder is no index, is unfinished, was written by a newer version, or is damaged.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise ArtifactError(f"no index at {folder}; build one with `sparsekv build-index DOC -o {folder}`")
    if not path.exists():
        raise ArtifactError(
            f"{folder} is unfinished: {MANIFEST} is missing; run the same `sparsekv build-index` again to resume"
        )
    try:
        fields = json.loads(path.read_bytes())
        least = fields["least_reader_version"]
        newer = least > SCHEMA_VERSION
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} is damaged ({type(error).__name__}); {_REBUILD}") from None
    if newer:
        raise ArtifactError(
            f"{path} has schema {fields.get('schema_version')} and needs a reader of schema {least}, this version "
            f"reads up to {SCHEMA_VERSION}; upgrade sparsekv"
        )
    if fields.get("manifest_sha256") != _self_hash(fields):
        raise ArtifactError(f"{path} was changed since it was written: its own hash does not match; {_REBUILD}")
    try:
        return Manifest.model_validate(fields)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ArtifactError(f"{path} is damaged: field {where} is not valid; {_REBUILD}") from None


_REBUILD = "build the index again with `sparsekv build-index --force`"


def _self_hash(fields: dict[str, object]) -> str:
    return hash_json({name: value for name, value in fields.items() if name != "manifest_sha256"})
