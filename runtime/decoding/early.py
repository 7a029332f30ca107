"""Starts to read an index to a GPU before the libraries are imported that its model needs."""

from sparsekv.formats.models.load import choose_device
from sparsekv.formats.reader import Artifact
from sparsekv.formats.schema import layer_file


def read_early(artifact: Artifact, method: str, device: str) -> None:
    """Start to read what a cache of a method on a GPU will need; on a CPU an index is mapped, and nothing happens.

    Args:
        method: its name.
        device: `auto`, `cpu`, `cuda` or `cuda:N`, see `load_model`.

    Raises:
        UsageError: an unknown or missing device.
    """
    where, manifest = choose_device(device), artifact.manifest
    if where.type == "cpu":
        return
    folders = ["context", *(name for name in manifest.methods if name == method)]
    artifact.read_early([layer_file(folder, layer) for folder in folders for layer in manifest.indexed_layers], where)
