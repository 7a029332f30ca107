"""Indices that a server has opened in memory for its forks. A fork uses such an index if its files are unchanged."""

from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.kept import Kept

if TYPE_CHECKING:
    from sparsekv.formats.models.load import LoadedModel
    from sparsekv.runtime.attention.config import DecodeConfig
    from sparsekv.runtime.cache.index_cache import IndexCache
    from sparsekv.runtime.decoding.prepare import PreparedMethod


@dataclass(frozen=True)
class KeptIndex:
    """An index that a server has opened in memory, after checking the probe (the last token's logits) and checksums.

    Attributes:
        prepared: the method of `config`, prepared for each layer; None for dense attention.
        config: the index's default config.
        cache: an unused cache for `config`. The cache and `prepared` share selectors.
    """

    artifact: Artifact
    loaded: "LoadedModel"
    prepared: "PreparedMethod | None"
    config: "DecodeConfig"
    cache: "IndexCache"


kept_indices = Kept[KeptIndex]()
_taken: list[KeptIndex] = []
"""The indices in memory that `open_kept` has returned in this process."""


def open_kept(folder: Path) -> Artifact | None:
    """Return the index of a folder that the server opened before it forked this process.

    Returns None if the server did not open it, or if its files have changed since.
    """
    kept = kept_indices.take(folder.absolute(), None)
    if kept is None:
        return None
    artifact = copy(kept.artifact)
    artifact.folder = folder  # as the user has named it, for messages
    _taken.append(kept)
    return artifact


def kept_index(artifact: Artifact) -> KeptIndex | None:
    """Return the server's `KeptIndex` of an index that `open_kept` returned; None for any other index."""
    return next((kept for kept in _taken if kept.artifact.manifest is artifact.manifest), None)
