"""Errors that a user can cause, and the remedies in their messages: suggested names, and commands ready to paste.

Each error has an exit code, and a message of one line with a remedy. This module also derives an index's default name
from the document's name, because remedies show it.
"""

import codecs
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import escape
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, get_args

NEAR = 70.0
"""The lowest similarity (0 to 100) at which a name is suggested: one or two letters of a word differ."""
LEAVE_OUT = "leave the option out, or give --model the index's own model if the index was built with this option"
"""Remedy for a build option that a model does not support. The option may come from the command line or the index."""
REBUILD = "build the index again from its document, with --force"


def suggestion(given: str, known: Iterable[str]) -> str:
    """Return ` (did you mean NAME?)` with the known name most similar to `given`; empty if none is similar enough."""
    near = nearest(given, known)
    return "" if near is None else f" (did you mean {near}?)"


def nearest(given: str, known: Iterable[str], *, parts: bool = True) -> str | None:
    """Return the known name that is most similar to `given`; None if none reaches a similarity of `NEAR`.

    With `parts`, a name is also similar if a part of it is.
    """
    from rapidfuzz import fuzz, process  # imported here to keep --help fast

    names = [*known]
    # The plain ratio comes first: WRatio also scores substrings, and would prefer tidaldecode to codes for `code`.
    for alike in (fuzz.ratio, fuzz.WRatio) if parts else (fuzz.ratio,):
        found = process.extractOne(given, names, scorer=alike, score_cutoff=NEAR, processor=str.lower)
        if found is not None:
            return str(found[0])
    return None


def choose_one(given: str, known: Iterable[str]) -> str:
    """Return `choose one of A, B, C`, with a suggestion if a known name is similar to `given`."""
    names = [*known]
    return f"choose one of {', '.join(names)}{suggestion(given, names)}"


def any_of(names: Iterable[str]) -> str:
    """Join names for a sentence: `A`, `A or B`, or `A, B or C`."""
    *before, last = names
    return f"{', '.join(before)} or {last}" if before else last


def reason_of(error: BaseException) -> str:
    """Return the operating system's reason for an error, or else the error's message, in lower case."""
    return (getattr(error, "strerror", None) or str(error)).lower()


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message, cut to 200 characters; without one, the error's class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


class SparsekvError(Exception):
    """A failure at run time. The message states what failed and what to do. Exit code 1."""

    exit_code = 1


class UsageError(SparsekvError):
    """A wrong call of a command, such as an unknown name or a value out of range. Exit code 2."""

    exit_code = 2


def check_choice(option: str, given: str, known: Iterable[str]) -> None:
    """Raise UsageError if `given` is not among an option's known values."""
    names = [*known]
    if given not in names:
        raise UsageError(f"{option} {given}: {choose_one(str(given), names)}")


_KINDS: dict[Any, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a string"),
}


def check_type(name: str, value: object, annotation: Any) -> None:
    """Raise UsageError if a value has none of the types of an annotation. The message begins with `name`.

    Only annotations of bool, int, float, str and None are checked; any other annotation allows every value. numpy's
    numbers count as numbers, and a bool does not. If a float is allowed, also raise UsageError for a whole number that
    is larger than every float.
    """
    allowed = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    if not set(allowed) <= {*_KINDS, type(None)} or (value is None and type(None) in allowed):
        return
    kinds = [_KINDS[one] for one in allowed if one in _KINDS]
    if not any(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) for kind, _ in kinds):
        wanted = " or ".join(words for _, words in kinds)
        raise UsageError(f"{name} {value!r}: give {wanted}")
    if float in allowed:
        try:
            float(value)  # type: ignore[arg-type]  # a number
        except OverflowError:
            raise UsageError(f"{name} is larger than every float: give a smaller number") from None


def check_at_least_one(parameters: object, *names: str) -> None:
    """Raise UsageError if one of the named parameters is below 1. The message names the command-line option."""
    for name in names:
        if (value := getattr(parameters, name)) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: give at least 1")


class ArtifactError(SparsekvError):
    """An index is unfinished, damaged, newer than this version, locked by a build, or cannot be read or written."""


class MissingIndexError(ArtifactError):
    """There is no index at the given path. This is wrong usage, as with any missing file. Exit code 2."""

    exit_code = 2


class IdentityError(SparsekvError):
    """An index does not belong to this model, tokenizer or chat template."""

    def __init__(self, field: str, built_with: object, found: object, remedy: str):
        self.field, self.built_with, self.found = field, built_with, found
        super().__init__(f"{field} differs: the index was built with {built_with}, this is {found}; {remedy}")


@dataclass(frozen=True)
class WaysOut:
    """Remedies that errors about writing an index suggest, besides freeing disk space.

    `elsewhere` is to write to another folder, and `less` is to write less. Each is empty if the command has no option
    for it.
    """

    elsewhere: str = "choose another folder with --output"
    less: str = "shorten the document with --max-tokens"

    def no_space(self, folder: Path, size: int, free: int) -> ArtifactError:
        ways = ", or ".join(part for part in ("make room", self.elsewhere, self.less) if part)
        return ArtifactError(f"{folder} needs {size / 1e6:.0f} MB and its disk has {free / 1e6:.0f} MB free; {ways}")

    def cannot_write(self, folder: Path, error: OSError) -> ArtifactError:
        ways = ", or ".join(part for part in ("free space or get permission there", self.elsewhere) if part)
        return ArtifactError(f"cannot write {folder}: {reason_of(error)}; {ways}, and run the same command again")


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
    """Yield the paths of documents next to an index's folder for which `build-index` chooses this folder by default.

    For manual.skv the paths are `manual`, which need not exist, and all existing `manual.*` except the folder itself.
    """
    own = folder.parent / folder.stem
    yield from (path for path in (own, *folder.parent.glob(f"{escape(own.name)}.*")) if path != folder)


TEXT_ENDINGS = ("*.txt", "*.md", "*.rst")
_LOOKED_AT = 4096
_SHORT, _SHORT_TAIL = 700, ("--tail", "16")
"""Number of bytes below which a text may be too short for the default tail, and the option with which it is indexed."""


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
        return f"build it with {_build(text, '-o', folder)}"
    # Names are compared without the ending that they share, because it would make all of them similar.
    near = nearest(folder.stem, (index.stem for index in folder.parent.glob("*.skv") if index.is_dir()))
    meant = "" if near is None else f" (did you mean {folder.with_name(f'{near}.skv')}?)"
    return f"name an existing index{meant}, or build it: {command('build-index', '--help')} says how"


def _build(text: Path, *options: str | Path) -> str:
    """Format the command that builds an index of a text, with a shorter tail for a short text."""
    return command("build-index", text, *options, *(_SHORT_TAIL if text.stat().st_size < _SHORT else ()))


def first_build_hint() -> str:
    """Return a hint for building an index: from the current folder's largest text (.txt, .md, .rst), or by the help."""
    texts = list(_texts(path for ending in TEXT_ENDINGS for path in Path().glob(ending)))
    if texts:
        return f"build one with {_build(max(texts, key=lambda text: text.stat().st_size))}"
    return f"build one: {command('build-index', '--help')} says how"


def add_methods_hint(folder: Path, methods: Iterable[str]) -> str:
    """Format the command that adds methods to an index.

    The command names the index and not its document, because the document may be gone, or text may have been appended.
    """
    return command("build-index", folder, *(part for name in methods for part in ("--method", name)))


def no_folder(given: Path) -> str:
    """Return the end of an error message about a path that is not a folder but was given as an index, with a remedy."""
    if given.suffix == ".skv" or not (given.is_file() and is_text(given)):
        return "is not a folder, and an index is a folder; name the folder that build-index printed"
    index = with_ending(given)
    if index.is_dir():
        return f"is a text, not an index; name the index beside it, {index}"
    return f"is a text, not an index; build one with {_build(given)}"


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
