"""What an index in 8 bits costs: as a sentence, and as commands print it in JSON."""

from typing import Any

from sparsekv.formats.kv_storage import KVStorage
from sparsekv.formats.schema import Manifest


def storing_line(storage: KVStorage, ids_sha256: str) -> str:
    """What dense attention loses by how keys and values are stored, and on what it was measured.

    Args:
        ids_sha256: the hash of the prompt's tokens.
    """
    line = (
        f"Keys and values are stored in {storage.dtype}: dense attention over them has an output error of "
        f"{storage.error:.4f} against the exact ones ({max(storage.errors):.4f} in layer {storage.worst}, its largest)"
    )
    if storage.measured_ids == ids_sha256:
        return f"{line}."
    return f"{line}, measured on an earlier text of {storage.measured_tokens:,} tokens."


def stored_line(manifest: Manifest) -> str:
    """`storing_line` of an index; of one that stores its own dtype, that nothing is lost."""
    if manifest.kv_storage is None:
        return f"Keys and values are stored in {manifest.dtype}, as the model computed them."
    return storing_line(manifest.kv_storage, manifest.prompt.ids_sha256)


def storage_record(storage: KVStorage | None) -> dict[str, Any] | None:
    """How keys and values are stored, and what it costs by layer; None where they are in the index's dtype."""
    if storage is None:
        return None
    return {
        "dtype": storage.dtype,
        "error": storage.error,
        "layers": storage.errors,
        "measured_tokens": storage.measured_tokens,
    }
