"""Indices that a server has opened for its forks. A fork uses such an index if the index's files are unchanged."""

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
    """An index whose probe and checksums have been checked with a model.

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
"""The kept indices that this process has opened."""


def open_kept(folder: Path) -> Artifact | None:
    """Return the kept index of a folder; None if the index is not kept, or if its files have changed."""
    kept = kept_indices.take(folder.absolute(), None)
    if kept is None:
        return None
    artifact = copy(kept.artifact)
    artifact.folder = folder  # as the user has named it, for messages
    _taken.append(kept)
    return artifact


def kept_index(artifact: Artifact) -> KeptIndex | None:
    """Return the kept index from which an index was opened; None if the index was opened from its files."""
    return next((kept for kept in _taken if kept.artifact.manifest is artifact.manifest), None)
