"""Order the files of a document, and report which changed.

Orders other than `path` keep more of the document's beginning unchanged, so that the next build reuses more rows.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from sparsekv.formats.documents.files import SourceText, SourceTexts
from sparsekv.formats.index.schema import BY_PATH, CHANGED_LAST, FileOrder, SourceFile

CHANGED, ADDED, REMOVED, RENAMED = "changed", "added", "removed", "renamed"


@dataclass(frozen=True)
class KnownFile:
    """A file in the earlier version of a document.

    `changes` is the number of versions in which the file differed from the version before.
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
      A new file counts as changed once.

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
        files[kept:] = sorted(files[kept:], key=lambda file: changes[file.path] if file.path in places else 1)
    return replace(sources, files=tuple(files))


def count_changes(files: Sequence[SourceText], known: Sequence[KnownFile]) -> dict[str, int]:
    """Return, by path, the number of versions in which a file differed from the version before."""
    before = {file.path: file for file in known}
    counts = {}
    for file in files:
        earlier = before.get(file.path)
        counts[file.path] = 0 if earlier is None else earlier.changes + (earlier.sha256 != file.sha256)
    return counts


def told_changes(before: Sequence[SourceFile], now: Sequence[SourceFile], same: int) -> str:
    """Return the first change in a document's files, and the numbers of other changes; an empty string if there are
    none.

    For example `a.md changed (also 2 files changed, 1 added)`. All text before the first change is as it was. A file
    whose bytes changed but whose text in the prompt did not is never named first: such as one with a new blank line at
    its end.

    Args:
        same: number of first tokens that both versions' prompts have in common.
    """
    earlier, later = ({file.path: file.sha256 for file in files} for files in (before, now))
    new = {content: path for path, content in reversed(later.items()) if path not in earlier}
    gone = {content: path for path, content in earlier.items() if path not in later}
    origins = {path: gone[content] for content, path in new.items() if content in gone}
    changes = {path: CHANGED for path, content in later.items() if earlier.get(path, content) != content}
    changes |= {path: ADDED for path in later if path not in earlier and path not in origins}
    changes |= {path: REMOVED for path in earlier if path not in later}
    changes |= {path: f"{RENAMED} to {new_path}" for new_path, path in origins.items()}
    for one, other in zip_longest(before, now):
        if one is not None and other is not None and _stays(one, other, same):
            continue
        paths = [origins.get(file.path, file.path) for file in (other, one) if file is not None]
        first = next((path for path in paths if path in changes), None)
        if first is None:
            return f"{paths[0]} moved{_also(changes.values())}"
        return f"{first} {changes.pop(first)}{_also(changes.values())}"
    return ""


def _stays(one: SourceFile, other: SourceFile, same: int) -> bool:
    """Whether the files at one place of two versions are the same file with the same text in the prompt."""
    return one.path == other.path and (one.sha256 == other.sha256 or one.stop == other.stop <= same)


def _also(changes: Collection[str]) -> str:
    counts = Counter(change.partition(" ")[0] for change in changes)
    parts = [(counts[kind], kind) for kind in (CHANGED, ADDED, REMOVED, RENAMED) if counts[kind]]
    files = [f" file{'s' * (count != 1)}" if place == 0 else "" for place, (count, _) in enumerate(parts)]
    told = ", ".join(f"{count:,}{file} {kind}" for (count, kind), file in zip(parts, files, strict=True))
    return f" (also {told})" if told else ""


def _unchanged(files: Sequence[SourceText], known: Sequence[KnownFile]) -> int:
    """Return the number of leading files that have the same path and content as in the earlier version."""
    same = [(file.path, file.sha256) == (one.path, one.sha256) for file, one in zip(files, known, strict=False)]
    return [*same, False].index(False)
