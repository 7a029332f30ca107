"""Choose and read the files of a document: the files of a folder, or of several files, folders and globs.

No file outside a folder is read through the folder: its links are never followed, and only regular files are read.
"""

import hashlib
import io
import os
import re
import stat
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from sparsekv.formats.documents import extracted
from sparsekv.formats.documents.document import (
    UTF_8,
    Document,
    check_encoding,
    detected_encoding,
    page_encoding,
    western_encoding,
)
from sparsekv.formats.documents.ignore_patterns import Patterns
from sparsekv.formats.errors import ENDING, UsageError, reason_of
from sparsekv.formats.index.folder import MARKER
from sparsekv.formats.index.schema import is_source_path

MOST_BYTES = 8 << 20
"""Maximum size of a plain text or HTML file that is read, in bytes."""
MOST_TEXT = 32 << 20
"""Maximum total bytes of a document's text files, and of the text that is extracted from its other files. These are
about 8 million tokens."""
MOST_ENTRIES = 1_000_000
MOST_DEPTH = 64
"""Maximum number of nested folders, all of which are open while the innermost one is read."""
MOST_IGNORED = 64 << 10
"""Maximum size of a .gitignore that is read, in bytes."""
NAMED = 3
"""Maximum number of left-out files that a message names for each reason."""
IGNORE_FILE = ".gitignore"
_WILDCARD = re.compile(r"[*?\[]")

HIDDEN, IGNORED, EXCLUDED, UNLISTED = "hidden", f"ignored by {IGNORE_FILE}", "excluded", "not included"
INDEX, LINK, SPECIAL, DEEP = "of indices", "linked", "irregular", f"below {MOST_DEPTH} folders"
ODD_NAME, UNREADABLE, NO_TEXT, EMPTY = "with control characters in their names", "unreadable", "not text", "empty"
PERHAPS = {name: f"not text in UTF-8 but perhaps in {name}" for name in ("latin-1", "cp1252")}
"""Reasons to leave out a file whose encoding is not certain."""
LARGE, LARGE_DOCUMENT = (f"larger than {size >> 20} MiB" for size in (MOST_BYTES, extracted.MOST_BYTES))
CHANGED, WILD = "changed meanwhile", f"unread in {IGNORE_FILE}"
LARGE_IGNORE = f"unread because it is larger than {MOST_IGNORED >> 10} KiB"
COUNTED = (HIDDEN, IGNORED, EXCLUDED, UNLISTED, LINK)
"""Reasons for which a message gives only the number of left-out files, without their names."""


@dataclass(frozen=True)
class Choice:
    """Patterns that choose the files of a folder, in the syntax of a .gitignore, and the encoding of the files.

    Args:
        include: a file is read only if one of these patterns matches its path; empty: all files are read.
        exclude: patterns of files and folders that are left out.
        encoding: the text encoding of all files.

    Raises:
        UsageError: a pattern is not valid, or the encoding is unknown.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    encoding: str = UTF_8

    def __post_init__(self) -> None:
        check_encoding(self.encoding)
        self.specs()

    def specs(self) -> dict[str, Patterns]:
        """Return the parsed patterns, by option and pattern as the user wrote them.

        Patterns with a leading ! are left out: they only admit paths that other patterns match.
        """
        options = ("--include", self.include), ("--exclude", self.exclude)
        named = {f"{option} {pattern}": pattern for option, patterns in options for pattern in patterns}
        specs = {name: _spec([pattern], name) for name, pattern in named.items()}
        return {name: spec for name, spec in specs.items() if not named[name].startswith("!")}


@dataclass(frozen=True)
class SourceText:
    """A file of a document: its path, its text, the index of each page's first character, and the sha256 of its bytes.

    `text` is without the file's leading blank lines and trailing white space. `first_line` is the number of the line at
    which `text` begins, counted from 1.
    """

    path: str
    sha256: str
    text: str
    first_line: int
    pages: tuple[int, ...] = ()

    @property
    def header(self) -> str:
        """The lines before the text, which tell a model the file's path."""
        return f"# File: {self.path}\n\n"


@dataclass(frozen=True)
class SourceTexts:
    """A document of several files: the files in the document's order, and the files that were left out.

    `left_out` has the paths of the left-out files for each reason, and `detected` has, for each detected encoding, the
    paths of the files that were read in it. `unmatched` has the patterns of a `Choice` that match no file and no
    folder.
    """

    files: tuple[SourceText, ...]
    left_out: dict[str, list[str]] = field(default_factory=dict)
    detected: dict[str, list[str]] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The text of the document: each file's header and text, with a blank line between two files."""
        return _BETWEEN.join(f"{file.header}{file.text}" for file in self.files)

    @property
    def places(self) -> Iterator[tuple[SourceText, int, int]]:
        """Yield each file with the range [start, stop) of its text in the document's text, in characters."""
        place = 0
        for file in self.files:
            place += len(file.header)
            yield file, place, place + len(file.text)
            place += len(file.text) + len(_BETWEEN)

    def told(self) -> str:
        """Return a line that reports the number of left-out files for each reason; empty if no file was left out.

        A remedy follows for files whose encoding is not certain.
        """
        parts = []
        for reason, paths in sorted(self.left_out.items()):
            parts.append(f"{len(paths):,} {reason}{'' if reason in COUNTED else _some(paths)}")
        unsure = next((name for name, reason in PERHAPS.items() if reason in self.left_out), None)
        hint = f"; convert such files to UTF-8, or give --encoding {unsure}, in which all files are read then"
        return f"left out: {', '.join(parts)}{hint if unsure else ''}" if parts else ""

    def told_detected(self) -> str:
        """Return a line about the encodings that were detected; empty if there are none."""
        parts = (f"{len(paths):,} as {name}{_some(paths)}" for name, paths in sorted(self.detected.items()))
        return f"encodings detected: {', '.join(parts)}" if self.detected else ""

    def told_unmatched(self) -> str:
        """Return a line about the patterns that match nothing; empty if there are none."""
        told = f"nothing matches {' and '.join(self.unmatched)}; patterns are relative to the folder that is named"
        return told if self.unmatched else ""

    def told_gone(self, before: Mapping[str, str]) -> str:
        """Return a list of the first files of an earlier version that this version lacks, with reasons.

        The list is empty if this version has all files of the earlier one.

        Args:
            before: sha256 of each file of the earlier version, by path.
        """
        reasons = {path.removesuffix("/"): reason for reason, paths in self.left_out.items() for path in paths}
        added = {file.sha256: f"renamed to {file.path}" for file in self.files if file.path not in before}
        here = {file.path for file in self.files}
        gone = {path: sha256 for path, sha256 in before.items() if path not in here}
        origins = {sha256: path for path, sha256 in gone.items()}  # one of several files of the same content

        def reason(path: str, sha256: str) -> str:
            of_folder = next((reasons[one] for one in map(str, PurePosixPath(path).parents) if one in reasons), "")
            renamed = added.get(sha256) if origins[sha256] == path else None
            return reasons.get(path) or renamed or of_folder or "not there"

        told = [f"{path} ({reason(path, sha256)})" for path, sha256 in gone.items()]
        return f"{', '.join(told[:NAMED])}{', ...' * (len(told) > NAMED)}"


def _some(paths: list[str]) -> str:
    return f" ({', '.join(paths[:NAMED])}{', ...' * (len(paths) > NAMED)})"


_BETWEEN = "\n\n"


def read_folder(folder: Path, choice: Choice) -> SourceTexts:
    """Read the files of a folder, with paths relative to the folder.

    Raises:
        UsageError: the folder cannot be read, is an unfinished index, or has no text, too much text or too many files.
    """
    if folder.suffix == ENDING or (folder / MARKER).exists():
        raise UsageError(f"{folder} is the folder of an unfinished index; name its document to resume the build")
    with extracted.Extractor() as extractor:
        reader = _Reader(choice, extractor)
        reader.walk(folder)
    return reader.result(Path(os.path.abspath(folder)), str(folder))


def read_several(names: Sequence[str], choice: Choice) -> SourceTexts:
    """Read several files, folders and globs as one document.

    Paths are relative to the current folder if all files are in it, and otherwise to the innermost folder that contains
    all files. A file that is named itself is read even if it is hidden, ignored, excluded or not included.

    Raises:
        UsageError: a named file does not exist or has text that cannot be read, a glob matches no file, a name is `-`,
            a folder cannot be read or has no file to read, or the document has no text, too much text or too many
            files.
    """
    with extracted.Extractor() as extractor:
        reader = _Reader(choice, extractor)
        for name in names:
            before = reader.chosen
            if name == "-":
                raise UsageError(
                    "standard input has no name, and a document of several files gives the name of each; name a file"
                )
            if os.path.isdir(name):
                reader.walk(Path(name))
                if reader.chosen == before:
                    raise UsageError(f"{name} has no file to index; leave it out, or change --include and --exclude")
            elif not is_glob(name):
                reader.read_named(name)
            else:
                root, pattern = _glob(name)
                if root.is_dir():
                    reader.walk(root, _spec([pattern], name))
                if reader.chosen == before:
                    raise UsageError(
                        f"no file matches {name}; patterns are as in a shell, and ** matches any number of folders"
                    )
    return reader.result(None, "the documents")


def is_glob(name: str) -> bool:
    """Whether a name has wildcards and no file has exactly this name."""
    return _WILDCARD.search(name) is not None and not os.path.lexists(name)


def folder_of_glob(pattern: str) -> Path:
    """Return the folder before a glob's first wildcard."""
    return _glob(pattern)[0]


def _glob(pattern: str) -> tuple[Path, str]:
    """Split a glob into the folder before its first wildcard, and a .gitignore pattern relative to that folder."""
    parts = pattern.split("/")
    fixed = next(place for place, part in enumerate(parts) if _WILDCARD.search(part))
    root = "/".join(parts[:fixed]) or ("/" if pattern.startswith("/") else ".")
    return Path(root), f"/{'/'.join(parts[fixed:])}"


def _spec(patterns: Iterable[str], named: str) -> Patterns:
    try:
        return Patterns.of(patterns)
    except ValueError:
        raise UsageError(
            f"{named}: this is not a valid pattern; give one as in a .gitignore, such as '*.py' or 'docs/**'"
        ) from None


_Rules = tuple[tuple[str, Patterns], ...]
"""Patterns of .gitignore files, each with the path of the file's folder, the outermost folder first. Paths and patterns
have a character for each byte."""


class _Reader:
    """Reads files into texts, and records why files are left out."""

    def __init__(self, choice: Choice, extractor: extracted.Extractor):
        self._encoding = check_encoding(choice.encoding)
        self._extractor = extractor
        self._include = _spec(choice.include, "") if choice.include else None
        self._exclude = _spec(choice.exclude, "")
        self._unmatched = choice.specs()
        # Keys are absolute paths.
        self._texts: dict[str, SourceText] = {}
        self._left_out: dict[str, str] = {}
        self._detected: dict[str, str] = {}
        self._entries, self._bytes = 0, 0
        self.chosen = 0
        """Number of files that were chosen to be read, including files that turned out to have no readable text."""

    def result(self, base: Path | None, named: str) -> SourceTexts:
        """Return the files that were read, ordered by the parts of their paths.

        Args:
            base: the folder to which paths are relative. None: the current folder if it contains all files, else the
                innermost folder that does.
            named: the name of the document in the error message.

        Raises:
            UsageError: no file with text was read.
        """
        inside = Path.cwd() if base is None else base
        if base is None and not all(Path(path).is_relative_to(inside) for path in self._texts):
            inside = Path(os.path.commonpath([os.path.dirname(path) for path in self._texts]))
        files, left_out = [], {path: reason for path, reason in self._left_out.items() if path not in self._texts}
        for path, text in self._texts.items():
            relative = Path(path).relative_to(inside).as_posix()
            if is_source_path(relative):
                files.append(replace(text, path=relative))
            else:
                left_out[path] = ODD_NAME
        files.sort(key=lambda file: file.path.split("/"))
        found = _by_value(left_out, inside), _by_value(self._detected, inside)
        texts = SourceTexts(tuple(files), *found, tuple(self._unmatched))
        if not files:
            why = texts.told()
            raise UsageError(
                f"{named}: no text to index{f' ({why})' if why else ''}; choose a folder or files with text"
            )
        return texts

    def read_named(self, name: str) -> None:
        """Read a file that the user named itself. An empty file is left out.

        Raises:
            UsageError: the file does not exist or has text that cannot be read; or an error of `_read`.
        """
        try:
            kind = os.stat(name).st_mode
        except (OSError, ValueError):
            raise UsageError(f"no such file: {name}") from None
        path = os.path.abspath(name)
        self._left_out.pop(path, None)  # such as hidden, for which a folder's walk leaves a file out
        if stat.S_ISREG(kind):
            self._read(path, lambda: os.open(name, _FLAGS))
        else:
            self._leave_out(SPECIAL, path)
        if path not in self._texts and (reason := self._left_out[path]) != EMPTY:
            raise UsageError(
                f"{name} is {reason}; convert it to text in UTF-8, leave it out, or give a pattern in quotes, which "
                "skips such files"
            )

    def walk(self, folder: Path, pattern: Patterns | None = None) -> None:
        """Read the files of a folder and its subfolders; with a pattern, only matching files.

        Raises:
            UsageError: the folder cannot be read, or has too many files or too much text.
        """
        try:
            descriptor = os.open(folder, _FLAGS | os.O_DIRECTORY)
        except OSError as error:
            raise UsageError(
                f"cannot read {folder}: {reason_of(error)}; make it readable, or name another folder"
            ) from None
        try:
            self._walk(descriptor, _Place(os.path.abspath(folder), pattern), "", (), 0)
        finally:
            os.close(descriptor)

    def _walk(self, descriptor: int, place: "_Place", prefix: str, rules: _Rules, depth: int) -> None:
        """Read the files of an open folder and its subfolders, in the order of their names.

        Args:
            prefix: the folder's path relative to `place`, with a / at its end; empty for `place` itself.
            rules: the .gitignore patterns of the folders above.
            depth: number of folders above.
        """
        entries = self._listed(descriptor, place)
        if any(entry.name == MARKER for entry in entries):
            self._leave_out(INDEX, os.path.join(place.folder, prefix))
            return
        if any(entry.name == IGNORE_FILE and entry.is_file(follow_symlinks=False) for entry in entries):
            ignored = self._ignored_by(descriptor, os.path.join(place.folder, prefix, IGNORE_FILE))
            rules = (*rules, (_bytewise(prefix), ignored))
        for entry in entries:
            path = f"{prefix}{entry.name}"
            whole = os.path.join(place.folder, path)
            folder = entry.is_dir(follow_symlinks=False)
            self._match(f"{path}/" if folder else path)
            if reason := self._reason(entry, path, place, rules, folder=folder):
                self._leave_out(reason, whole)
            elif not folder:
                self._read_entry(descriptor, entry.name, whole)
            elif depth >= MOST_DEPTH:
                self._leave_out(DEEP, whole)
            else:
                with self._opened(descriptor, entry.name, whole) as below:
                    if below is not None:
                        self._walk(below, place, f"{path}/", rules, depth + 1)

    def _match(self, path: str) -> None:
        """Remove the patterns that match a path from `_unmatched`. A folder's path ends with a /."""
        for name in [name for name, spec in self._unmatched.items() if spec.choose(path)]:
            del self._unmatched[name]

    def _listed(self, descriptor: int, place: "_Place") -> list[os.DirEntry[str]]:
        entries = []
        with os.scandir(descriptor) as found:
            for entry in found:
                entries.append(entry)
                self._entries += 1
                if self._entries > MOST_ENTRIES:
                    raise UsageError(f"{place.folder} has more than {MOST_ENTRIES:,} files; name a folder in it")
        return sorted(entries, key=lambda entry: entry.name)

    @contextmanager
    def _opened(self, descriptor: int, name: str, path: str) -> Iterator[int | None]:
        """Yield an open descriptor of a subfolder; None if it cannot be opened, which is recorded as left out."""
        try:
            below = os.open(name, _FLAGS | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
        except OSError:
            self._leave_out(UNREADABLE, path)
            yield None
            return
        try:
            yield below
        finally:
            os.close(below)

    def _reason(self, entry: os.DirEntry[str], path: str, place: "_Place", rules: _Rules, *, folder: bool) -> str:
        """Return the reason why a file or folder is left out; empty if it is to be read."""
        shown = f"{path}/" if folder else path
        if entry.name.startswith("."):
            return HIDDEN
        if entry.is_symlink():
            return LINK
        if folder and entry.name.endswith(ENDING):
            return INDEX
        if _is_ignored(_bytewise(shown), rules):
            return IGNORED
        if self._exclude.ignores(shown):
            return EXCLUDED
        if folder:
            return ""
        if not place.has(path) or (self._include is not None and not self._include.choose(path)):
            return UNLISTED
        if not entry.is_file(follow_symlinks=False):
            return SPECIAL
        return "" if is_source_path(path) else ODD_NAME

    def _ignored_by(self, descriptor: int, path: str) -> Patterns:
        """Read the .gitignore of an open folder, for paths as `_bytewise` returns them.

        Invalid patterns are skipped, and recorded as left out.
        """
        kept = list[str]()
        data = _content(lambda: os.open(IGNORE_FILE, _FLAGS | os.O_NOFOLLOW, dir_fd=descriptor), MOST_IGNORED)
        lines = data.removeprefix(BOM_UTF8).split(b"\n") if isinstance(data, bytes) else []
        if not isinstance(data, bytes):
            self._leave_out(LARGE_IGNORE if data == LARGE else data, path)
        for line in (_as_characters(line.removesuffix(b"\r")) for line in lines):
            try:
                Patterns.of([line])
                kept.append(line)
            except ValueError:
                self._leave_out(WILD, f"{path}: {line.encode('latin-1').decode('utf-8', 'replace')[:40]}")
        return Patterns.of(kept)

    def _read_entry(self, descriptor: int, name: str, path: str) -> None:
        self._read(path, lambda: os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=descriptor))

    def _read(self, path: str, opener: Callable[[], int]) -> None:
        """Read a file's text, or record why the file is left out.

        Args:
            path: the absolute path.
            opener: opens the file, and returns its descriptor.

        Raises:
            UsageError: the files that were read so far have too much text.
        """
        self.chosen += 1
        if path in self._texts:
            return
        kind = extracted.kind_of(path)
        packed = kind in (extracted.PDF, extracted.DOCX)
        data = _content(opener, extracted.MOST_BYTES if packed else MOST_BYTES)
        if isinstance(data, str):
            self._leave_out(LARGE_DOCUMENT if packed and data == LARGE else data, path)
            return
        try:
            found = self._text(path, data, kind)
        except extracted.NotExtractedError as reason:
            self._leave_out(str(reason), path)
            return
        except UsageError:
            unsure = western_encoding(data) if self._encoding == UTF_8 else None
            self._leave_out(EMPTY if not data.strip() else PERHAPS.get(unsure or "", NO_TEXT), path)
            return
        text = found.text.rstrip()
        self._bytes += len(data) if kind is None else len(text.encode())
        if self._bytes > MOST_TEXT:
            raise UsageError(
                f"the files have more than {MOST_TEXT >> 20} MiB of text; choose fewer with --include or --exclude"
            )
        blank = text[: len(text) - len(text.lstrip())]
        cut = blank.rfind("\n") + 1
        pages = tuple(page - cut for page in found.pages)
        first_line = 1 + blank.count("\n")
        self._texts[path] = SourceText(path, hashlib.sha256(data).hexdigest(), text[cut:], first_line, pages)

    def _text(self, path: str, data: bytes, kind: int | None) -> extracted.PagedText:
        """Return a file's text. An encoding that is detected is recorded.

        Raises:
            UsageError: the file is not text, or its encoding is not certain.
            NotExtractedError: the file is not plain text, and its text cannot be extracted.
        """
        if kind is not None and kind != extracted.HTML:
            return self._extractor.text(kind, data)
        encoding = self._encoding if kind is None else page_encoding(data, self._encoding)
        try:
            text = Document(path, io.BytesIO(data), encoding).whole()
        except UsageError:
            found = detected_encoding(data) if self._encoding == UTF_8 else None
            if found is None:
                raise
            text = Document(path, io.BytesIO(data), found).whole()
            self._detected[path] = found
        return extracted.PagedText(text) if kind is None else self._extractor.text(kind, text.encode())

    def _leave_out(self, reason: str, path: str) -> None:
        """Record why a file or folder is left out. An earlier reason stays, unless it is `UNLISTED`."""
        if self._left_out.get(path, UNLISTED) == UNLISTED:
            self._left_out[path] = reason


def _by_value(found: Mapping[str, str], folder: Path) -> dict[str, list[str]]:
    """Group paths by their value. Paths in the folder become relative to it."""
    grouped: dict[str, list[str]] = {}
    for path, value in found.items():
        grouped.setdefault(value, []).append(path.removeprefix(os.path.join(folder, "")))
    return grouped


@dataclass(frozen=True)
class _Place:
    """The absolute path of a folder that is read, and the pattern that its files must match; None: all files."""

    folder: str
    pattern: Patterns | None

    def has(self, path: str) -> bool:
        return self.pattern is None or self.pattern.choose(path)


def _bytewise(path: str) -> str:
    """Return a path with a character for each of its bytes: for git, a ? or a set of characters matches one byte."""
    return _as_characters(os.fsencode(path))


def _as_characters(data: bytes) -> str:
    return data.decode("latin-1")


_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def _is_ignored(path: str, rules: _Rules) -> bool:
    """Whether git would ignore a path.

    The innermost .gitignore with a matching pattern decides, by its last matching pattern. A pattern has to match the
    path itself: `!src/` does not admit the files in a folder `src`, for each of which the walk calls this function. A
    folder's path ends with a /.
    """
    found = (patterns.ignores(path.removeprefix(folder)) for folder, patterns in reversed(rules))
    return next((ignores for ignores in found if ignores is not None), False)


def _content(opener: Callable[[], int], limit: int) -> bytes | str:
    """Return a file's bytes, or the reason why the file is left out, such as more than `limit` bytes."""
    try:
        with open(opener(), "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            if not stat.S_ISREG(before.st_mode):
                return SPECIAL
            pieces, left = [], limit + 1
            while left and before.st_size <= limit and (piece := file.read(left)):
                pieces.append(piece)
                left -= len(piece)
            after = os.fstat(file.fileno())
    except OSError:
        return UNREADABLE
    if before.st_size > limit or not left:
        return LARGE
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        return CHANGED
    return b"".join(pieces)
