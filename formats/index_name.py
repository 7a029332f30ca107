"""What a document's index is called where nobody names it: as the document, with .skv in the place of its extension."""

import re
from collections.abc import Iterator
from glob import escape
from pathlib import Path

ENDING = ".skv"

_EXTENSION = re.compile(r"\.(?!v\d+$)[a-z][a-z0-9_+-]*", re.IGNORECASE)
"""Letters first: the last parts of Apache-2.0, notes.2024-05 and paper.v2 belong to the name."""


def has_extension(path: Path) -> bool:
    """Whether a name ends with an extension, such as .txt or .md, and not with a version or a date."""
    return _EXTENSION.fullmatch(path.suffix) is not None


def with_ending(path: Path, ending: str = ENDING) -> Path:
    """A path with another ending in the place of its extension, or behind a name that has none."""
    return path.with_suffix(ending) if has_extension(path) else path.with_name(path.name + ending)


def beside(folder: Path) -> Iterator[Path]:
    """The files beside an index from which it would have its name."""
    own = folder.parent / folder.stem
    yield from (path for path in (own, *folder.parent.glob(f"{escape(own.name)}.*")) if path != folder)
