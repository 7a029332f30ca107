"""Format commands that messages show, ready to paste into a shell, and derive default names of indices."""

import codecs
import re
import shlex
from collections.abc import Iterable, Iterator
from glob import escape
from pathlib import Path

from sparsekv.formats.errors import nearest

ENDING = ".skv"
AUTO_ELSEWHERE = "auto works only as --method of the commands `generate`, `chat` and `serve`"
"""Reason for which other commands refuse the method `auto`."""

_EXTENSION = re.compile(r"\.(?!v\d+$)[a-z][a-z0-9_+-]*", re.IGNORECASE)
"""An extension begins with a letter and is not a version such as .v2. So Apache-2.0, notes.2024-05 and paper.v2 have no
extension."""


def has_extension(path: Path) -> bool:
    """Whether a name ends with an extension, such as .txt or .md, and not with a version or a date."""
    return _EXTENSION.fullmatch(path.suffix) is not None


def with_ending(path: Path, ending: str = ENDING) -> Path:
    """Replace a path's extension by `ending`, or append `ending` to a name without an extension."""
    return path.with_suffix(ending) if has_extension(path) else path.with_name(path.name + ending)


def beside(folder: Path) -> Iterator[Path]:
    """Yield the paths next to an index's folder from which `build-index` may make this folder by default.

    For manual.skv these are `manual`, which need not exist, and all paths `manual.*` except the folder itself.
    """
    own = folder.parent / folder.stem
    yield from (path for path in (own, *folder.parent.glob(f"{escape(own.name)}.*")) if path != folder)


TEXT_ENDINGS = ("*.txt", "*.md", "*.rst")
_LOOKED_AT = 4096


def command(*parts: str | Path) -> str:
    """Format a sparsekv command line in backticks, quoted for a shell."""
    return f"`{shlex.join(['sparsekv', *map(_argument, parts)])}`"


def _argument(part: str | Path) -> str:
    """Prefix a path that begins with a dash with `./`, because it would be parsed as an option."""
    return f"./{part}" if isinstance(part, Path) and str(part).startswith("-") else str(part)


def build_hint(folder: Path) -> str:
    """Return a hint for a missing index.

    The hint is the first that applies: name the index FOLDER.skv, which exists; build the index from the text of the
    same name (manual.txt for manual.skv); name an existing index, with a suggestion if one has a similar name, or read
    the help of `build-index`.
    """
    named = folder.with_name(f"{folder.name}.skv")
    if named.is_dir():
        return f"name {named}, which is there"
    for text in _texts(beside(folder)):
        return f"build it with {command('build-index', text, '-o', folder)}"
    # Names are compared without the ending that they share, because it would make all of them similar.
    near = nearest(folder.stem, (index.stem for index in folder.parent.glob("*.skv") if index.is_dir()))
    meant = "" if near is None else f" (did you mean {folder.with_name(f'{near}.skv')}?)"
    return f"name an existing index{meant}, or build it: {command('build-index', '--help')} says how"


def first_build_hint() -> str:
    """Return a hint for building an index: from the current folder's largest text (.txt, .md, .rst), or by the help."""
    texts = list(_texts(path for ending in TEXT_ENDINGS for path in Path().glob(ending)))
    if texts:
        return f"build one with {command('build-index', max(texts, key=lambda text: text.stat().st_size))}"
    return f"build one: {command('build-index', '--help')} says how"


def add_methods_hint(folder: Path, methods: Iterable[str]) -> str:
    """Format the command that adds methods to an index.

    The command names the index and not its document, because the document may be gone, or text may have been appended.
    """
    return command("build-index", folder, *(part for name in methods for part in ("--method", name)))


def no_folder(given: Path) -> str:
    """Return the end of an error message about a file that was given as an index: what the file is, and a remedy."""
    if given.suffix == ".skv" or not (given.is_file() and is_text(given)):
        return "is not a folder, and an index is a folder; name the folder that build-index printed"
    index = with_ending(given)
    if index.is_dir():
        return f"is a text, not an index; name the index beside it, {index}"
    return f"is a text, not an index; build one with {command('build-index', given)}"


def is_text(path: Path) -> bool:
    """Whether a file can be read, and its first 4 KiB are UTF-8 text without zero bytes and not only white space."""
    try:
        with path.open("rb") as file:
            data = file.read(_LOOKED_AT)
        # The limit may cut the last character of a longer file.
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < _LOOKED_AT)
    except (OSError, UnicodeDecodeError):
        return False
    return bool(text.strip()) and "\0" not in text


def _texts(paths: Iterable[Path]) -> Iterator[Path]:
    return (path for path in sorted(paths) if path.is_file() and is_text(path))
