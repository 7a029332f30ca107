"""What an index in 8 bits costs: as a sentence, and as commands print it in JSON."""

from typing import Any

from sparsekv.formats.kv_storage import KVStorage
from sparsekv.formats.schema import Manifest


def stored_line(manifest: Manifest) -> str | None:
    """What dense attention loses by how an index stores keys and values, and on what it was measured; None where they
    are in the index's dtype."""
    storage = manifest.kv_storage
    if storage is None:
        return None
    line = (
        f"Keys and values are stored in {storage.dtype}: dense attention over them has an output error of "
        f"{storage.error:.4f} against the exact ones ({max(storage.errors):.4f} in layer {storage.worst}, its largest)"
    )
    if storage.measured_ids == manifest.prompt.ids_sha256:
        return f"{line}."
    return f"{line}, measured on an earlier text of {storage.measured_tokens:,} tokens."


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
