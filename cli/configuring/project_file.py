"""Find and read `sparsekv.toml`, the defaults of a project."""

import os
import re
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsekv.formats.errors import UsageError

NAME = "sparsekv.toml"
MOST = 2**16
"""Bytes of such a file: it comes from a folder that somebody else may have made."""
_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?")
_KEY = re.compile(r"\s*([\w.'\" -]+?)\s*=")


@dataclass(frozen=True)
class ProjectFile:
    """A project's defaults: the file, its tables as TOML has them, and the line of each key by its path."""

    path: Path
    tables: dict[str, Any]
    lines: dict[tuple[str, ...], int]

    @property
    def shown(self) -> str:
        """The file's path from the current folder, for messages."""
        return os.path.relpath(self.path)

    def where(self, *keys: str) -> str:
        """The file and the line of a key, such as `sparsekv.toml, line 3`; the file alone if the line is not known."""
        return f"{self.shown}, line {self.lines[keys]}" if keys in self.lines else self.shown


def project_file() -> ProjectFile | None:
    """The nearest `sparsekv.toml` in the current folder and those above it, up to the home or root; None without one.

    Raises:
        UsageError: it cannot be read, or is no TOML.
    """
    path = _find()
    return None if path is None else _parse(path, _read(path))


def _find() -> Path | None:
    try:
        here = Path.cwd()
    except OSError:  # the current folder was removed
        return None
    home = Path(os.path.expanduser("~"))
    for folder in (here, *here.parents):
        if os.path.lexists(folder / NAME):
            return folder / NAME
        if folder == home:
            break
    return None


def _read(path: Path) -> str:
    shown = os.path.relpath(path)
    try:
        # Without blocking: nobody may write to what a stranger made a pipe.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"{shown} is no file; move it away, or write the project's defaults there")
            data = file.read(MOST + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{shown} cannot be read: {reason}; mend it or move it away") from None
    if len(data) > MOST:
        raise UsageError(f"{shown} is longer than {MOST >> 10} KiB; keep a project's defaults alone in it")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{shown} is not text in UTF-8; convert it") from None


def _parse(path: Path, text: str) -> ProjectFile:
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UsageError(f"{os.path.relpath(path)} is no valid TOML: {reason}; mend it or move it away") from None
    return ProjectFile(path, tables, _lines(text))


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """The line of each table and key that has one of its own, which the library does not say."""
    table: tuple[str, ...] = ()
    found: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if header := _HEADER.fullmatch(line.rstrip("\r")):
            table = _names(header[1])
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault((*table, *_names(key[1])), number)
    return found


def _names(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
