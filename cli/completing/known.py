"""The commands and options that completion offers: read from a cache, because the commands themselves import torch."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparsekv.formats.user.cache import cache_root, read_small, replace_small

_FILE = "completion.json"
_PACKAGE = Path(__file__).parents[2]
_DECIDE = ("cli", "indexing", "runtime")
"""Folders of the package that hold the commands, and the methods whose fields are options."""


@dataclass(frozen=True)
class KnownOption:
    """An option by its names; `--no-x` is one of its own.

    value: what its value is: none (a flag), names (one of `names`), index, model, file, folder or any.
    owners: the methods that it belongs to; none for an option of the command itself.
    """

    names: list[str]
    help: str
    value: str
    choices: list[str] = field(default_factory=list)
    repeatable: bool = False
    owners: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class KnownCommand:
    """A command: its options, what its arguments are (as a KnownOption's value and choices), and commands below it."""

    help: str
    options: list[KnownOption] = field(default_factory=list)
    arguments: list[KnownOption] = field(default_factory=list)
    commands: dict[str, "KnownCommand"] = field(default_factory=dict)

    @classmethod
    def of(cls, record: dict[str, Any]) -> "KnownCommand":
        """A command from what `asdict` made of it."""
        options, arguments = ([KnownOption(**one) for one in record[name]] for name in ("options", "arguments"))
        commands = {name: cls.of(one) for name, one in record["commands"].items()}
        return cls(record["help"], options, arguments, commands)


def remembered() -> KnownCommand | None:
    """The cached commands of the installed version; None if there is no cache, or one of another version."""
    try:
        record = json.loads(read_small(cache_root() / _FILE) or "{}")
        return KnownCommand.of(record["program"]) if record["of"] == _installed() else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def remember(program: KnownCommand) -> None:
    """Keep it for the next completion; a cache that cannot be written keeps nothing."""
    replace_small(cache_root() / _FILE, json.dumps({"of": _installed(), "program": asdict(program)}))


def _installed() -> list[Any]:
    """Changes when the program does, or when a package is installed, which may bring methods."""
    files = sorted(path for folder in _DECIDE for path in _files(_PACKAGE / folder))
    packages = [path for path in sys.path if path.endswith("-packages") and os.path.isdir(path)]
    return [[path, os.stat(path).st_mtime_ns] for path in (*files, *packages)]


def _files(folder: Path) -> Iterator[str]:
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from _files(Path(entry.path))
        elif entry.name.endswith(".py"):
            yield entry.path
