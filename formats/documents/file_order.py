"""Order the files of a document, so that a later edit changes as little of the text before it as possible."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparsekv.formats.documents.files import SourceText, SourceTexts
from sparsekv.formats.index.schema import BY_PATH, CHANGED_LAST, FileOrder


@dataclass(frozen=True)
class KnownFile:
    """A file of an earlier version of a document.

    `changes` is the number of versions in which the file was new or had another text than before.
    """

    path: str
    sha256: str
    changes: int = 0


def in_order(sources: SourceTexts, order: FileOrder, known: Sequence[KnownFile]) -> SourceTexts:
    """Order the files of a document.

    The orders are:

    - path: by the parts of the paths.
    - stable: known files in their order, then the others by path.
    - changed-last: the known files before the first one that has changed or is gone, in their order. The others follow:
      the files with the fewest changes first, then in the order of `stable`.

    Args:
        sources: the files, ordered by path.
        known: the files of the document's earlier version, in its order; empty if there is none.
    """
    if order == BY_PATH:
        return sources
    places = {file.path: place for place, file in enumerate(known)}
    files = sorted(sources.files, key=lambda file: places.get(file.path, len(known)))
    if order == CHANGED_LAST:
        kept, changes = _unchanged(files, known), count_changes(files, known)
        files[kept:] = sorted(files[kept:], key=lambda file: changes[file.path])
    return replace(sources, files=tuple(files))


def count_changes(files: Sequence[SourceText], known: Sequence[KnownFile]) -> dict[str, int]:
    """Return the number of versions in which each file was new or changed. The document's first version counts as
    none."""
    before = {file.path: file for file in known}
    counts = {}
    for file in files:
        earlier = before.get(file.path)
        same = earlier is not None and earlier.sha256 == file.sha256
        counts[file.path] = (0 if earlier is None else earlier.changes) + (bool(known) and not same)
    return counts


def _unchanged(files: Sequence[SourceText], known: Sequence[KnownFile]) -> int:
    """Return the number of leading files that are those of the earlier version, with the same text."""
    same = [(file.path, file.sha256) == (one.path, one.sha256) for file, one in zip(files, known, strict=False)]
    return [*same, False].index(False)
