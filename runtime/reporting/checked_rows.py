"""Reads what a report measures on, layer by layer, after a check of the files' checksums."""

from collections.abc import Iterable, Iterator

import torch

from sparsekv.formats.ahead import read_ahead
from sparsekv.formats.reader import Artifact
from sparsekv.formats.schema import layer_file
from sparsekv.runtime.cache.layer_rows import LayerRows

CHECKED_AHEAD = 8  # layers whose files are checked while one is measured


def checked_rows(
    artifact: Artifact, names: Iterable[str], layers: list[int], device: torch.device
) -> Iterator[LayerRows]:
    """Keys and values of each layer on a device; those of the next layer are read meanwhile.

    Threads check the files of several layers at once: a GPU measures a layer sooner than one core has hashed its keys.

    Args:
        names: methods whose files are checked too.

    Raises:
        ArtifactError: a file whose content has changed.
    """
    names = list(names)

    def check(layer: int) -> int:
        artifact.check_sums(measured_files(artifact, names, [layer]))
        return layer

    def read(layer: int) -> LayerRows:
        rows = LayerRows(artifact, layer)
        rows.on(device)
        return rows

    return read_ahead(read_ahead(layers, check, CHECKED_AHEAD), read, 1)


def measured_files(artifact: Artifact, names: Iterable[str], layers: Iterable[int]) -> list[str]:
    """Names of the files that are read to measure methods on some layers."""
    folders = ["context", "queries", *(name for name in names if name in artifact.manifest.methods)]
    return [layer_file(folder, layer) for folder in folders for layer in layers]
