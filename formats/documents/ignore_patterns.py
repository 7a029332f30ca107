"""Match paths with the patterns of a .gitignore, as git does."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

_CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": r"\ \t",
    "cntrl": r"\0-\x1f\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": r"\ -~",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\t-\r\ ",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}
"""Characters of the classes that a set of characters may name, such as `[[:digit:]_]`, as in a regular expression."""


@dataclass(frozen=True)
class _Pattern:
    """A pattern: whether it ignores or admits matching paths, whether it matches only folders, and a regex of paths."""

    ignores: bool
    folders: bool
    path: re.Pattern[str]

    @classmethod
    def of(cls, line: str) -> "_Pattern | None":
        """Parse a line; None for a comment or a blank line. Raises ValueError for a line that is no pattern."""
        if line.startswith("#"):
            return None
        text = _without_spaces(line)
        ignores, folders = not text.startswith("!"), text.endswith("/")
        glob = text.removeprefix("!").removesuffix("/")
        if not glob and not ignores:
            raise ValueError("nothing after the !")
        if not glob:
            return None
        anywhere = "" if "/" in glob else "(?:.*/)?"
        return cls(ignores, folders, re.compile(f"{anywhere}{_expression(glob.removeprefix('/'))}", re.DOTALL))

    def matches(self, path: str) -> bool:
        """Whether the pattern matches a file or folder itself. A folder's path ends with a /."""
        is_folder = path.endswith("/")
        return (is_folder or not self.folders) and self.path.fullmatch(path.removesuffix("/")) is not None


@dataclass(frozen=True)
class Patterns:
    """Patterns of a .gitignore, in their order. Paths are relative to its folder; a folder's path ends with a /."""

    patterns: tuple[_Pattern, ...]

    @classmethod
    def of(cls, lines: Iterable[str]) -> Self:
        """Parse the lines of a .gitignore. Raises ValueError for a line that is no pattern."""
        return cls(tuple(pattern for line in lines if (pattern := _Pattern.of(line)) is not None))

    def ignores(self, path: str) -> bool | None:
        """Whether a file or folder is ignored: the last pattern that matches it decides. None if no pattern matches."""
        return next((one.ignores for one in reversed(self.patterns) if one.matches(path)), None)

    def choose(self, path: str) -> bool:
        """Whether patterns of an option, such as `--include`, choose a file or folder: the last that matches decides.

        A pattern without ! also matches the files and folders in a folder that it matches.
        """
        around = [*_folders_around(path)]
        matching = (
            one
            for one in reversed(self.patterns)
            if one.matches(path) or (one.ignores and any(map(one.matches, around)))
        )
        return next((one.ignores for one in matching), False)


def _folders_around(path: str) -> Iterator[str]:
    return (path[: found.end()] for found in re.finditer("/", path[:-1]))


def _without_spaces(line: str) -> str:
    """Return a line without the spaces at its end. A space after a backslash stays."""
    parts = re.findall(r"\\?.", line, re.DOTALL)
    while parts and parts[-1] == " ":
        parts.pop()
    return "".join(parts)


_TOKEN = re.compile(r"\*+|\\?.", re.DOTALL)
_BRACKET = re.compile(r"\[:(\w*):\]|(?:\\(.)|([^\\]))(?:-(?:\\(.)|([^\]\\])))?", re.DOTALL)
"""A class, or a character or a range of characters, in a set of characters."""


def _expression(glob: str) -> str:
    """Return the regular expression of a pattern without its ! and without slashes at its ends.

    A star matches as little as the text up to the next star needs, and other lengths are not tried (atomic groups): a
    longer match would only leave less for the rest of the pattern. Otherwise a pattern of many stars, which may be a
    stranger's, would take exponential time. All lengths are tried only for the last star.

    Raises ValueError for a lone backslash at the end, and for a set of characters without an end or with an unknown
    class, because git ignores nothing by such a pattern.
    """
    first, *others = _sections(glob)
    pieces = [_section(first, is_last=not others)]
    pieces += [f"(?>(?:.*?/)??{_section(one, is_last=False)})" for one in others[:-1]]
    pieces += [f"(?:.*/)?{_section(one, is_last=True)}" for one in others[-1:]]
    return "".join(pieces)


def _section(texts: list[str], *, is_last: bool) -> str:
    """Join the regular expressions of texts between stars, where a star matches no slash."""
    *before, last = texts[1:] or [""]
    pieces = [texts[0], *(f"(?>[^/]*?{text})" for text in before)]
    if texts[1:]:
        pieces.append(f"[^/]*{last}" if is_last else f"(?>[^/]*?{last})")
    return "".join(pieces)


def _sections(glob: str) -> list[list[str]]:
    """Return the expressions of a pattern's texts between its stars.

    Sections lie between stars that match any number of folders, and include no slash behind such stars. Behind stars
    at the end, the last section matches any text. Raises ValueError as `_expression` does.
    """
    sections, place = [[""]], 0
    while found := _TOKEN.match(glob, place):
        token, place = found[0], found.end()
        if token == "\\":
            raise ValueError("a backslash at the end")
        if token == "[":
            piece, place = _set(glob, place)
            sections[-1][-1] += piece
        elif token[0] == "*":
            is_name = found.start() == 0 or glob[found.start() - 1] == "/"
            if len(token) > 1 and is_name and glob[place : place + 1] in ("", "/"):
                sections.append([".*" if place == len(glob) else ""])
                place += 1  # the slash after the stars, too
            else:
                sections[-1].append("")
        else:
            sections[-1][-1] += "[^/]" if token == "?" else re.escape(token[-1])
    return sections


def _set(glob: str, place: int) -> tuple[str, int]:
    """Return the regular expression of a set of characters, and the index after its closing bracket.

    `place` is the index after its opening bracket.
    """
    negated = glob[place : place + 1] in ("!", "^")
    place = first = place + negated
    parts = list[str]()
    while place == first or glob[place : place + 1] != "]":
        found = _BRACKET.match(glob, place)
        if found is None:
            raise ValueError("a set of characters without an end")
        name, *ends = found.groups()
        if name is not None:
            parts.append(_CLASSES[name] if name in _CLASSES else _unknown(name))
        else:
            low, high = ends[0] or ends[1], ends[2] or ends[3]
            parts.append(re.escape(low))
            if high is not None and low <= high:
                parts.append(f"{re.escape(low)}-{re.escape(high)}")
        place = found.end()
    within = "".join(parts)
    return f"[^/{within}]" if negated else f"(?!/)[{within}]", place + 1


def _unknown(name: str) -> str:
    raise ValueError(f"no class of characters is called {name}")
