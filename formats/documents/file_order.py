"""Order the files of a document. Orders other than `path` keep a long beginning of an edited document unchanged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparsekv.formats.documents.files import SourceText, SourceTexts
from sparsekv.formats.index.schema import BY_PATH, CHANGED_LAST, FileOrder


@dataclass(frozen=True)
class KnownFile:
    """A file in the earlier version of a document.

    `changes` is the number of versions in which the file was new, or differed from the version before.
    """

    path: str
    sha256: str
    changes: int = 0


def in_order(sources: SourceTexts, order: FileOrder, known: Sequence[KnownFile]) -> SourceTexts:
    """Order the files of a document.

    The orders are:

    - path: by the parts of the paths.
    - stable: the earlier version's files in their earlier order, then new files by path.
    - changed-last: the leading files of the earlier version up to the first that has changed or is gone, in their
      earlier order. All other files follow by their number of changes, fewest first; ties are in the order of `stable`.

    Args:
        sources: the files, ordered by path.
        known: the files of the document's earlier version, in their order; empty if there is no earlier version.
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
    """Return, for each file's path, the number of versions in which the file was new or changed.

    The document's first version is not counted.
    """
    before = {file.path: file for file in known}
    counts = {}
    for file in files:
        earlier = before.get(file.path)
        same = earlier is not None and earlier.sha256 == file.sha256
        counts[file.path] = (0 if earlier is None else earlier.changes) + (bool(known) and not same)
    return counts


def _unchanged(files: Sequence[SourceText], known: Sequence[KnownFile]) -> int:
    """Return the number of leading files that have the same path and content as in the earlier version."""
    same = [(file.path, file.sha256) == (one.path, one.sha256) for file, one in zip(files, known, strict=False)]
    return [*same, False].index(False)
