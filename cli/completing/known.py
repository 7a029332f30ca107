"""Cache of the commands and options for shell completion. Without the cache, completion would import all commands and
torch."""

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
"""Folders of the package with commands and methods. Fields of methods are options, so both determine completions."""


@dataclass(frozen=True)
class KnownOption:
    """Description of an option for completion. `--no-x` is a separate option.

    Attributes:
        value: the kind of the option's value: none (a flag), names (one of `choices`), index, model, file, folder or
            any.
        owners: the methods that the option belongs to; empty for an option of the command itself.
    """

    names: list[str]
    help: str
    value: str
    choices: list[str] = field(default_factory=list)
    repeatable: bool = False
    owners: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class KnownCommand:
    """Description of a command for completion: options, arguments and subcommands. An argument is a KnownOption without
    names."""

    help: str
    options: list[KnownOption] = field(default_factory=list)
    arguments: list[KnownOption] = field(default_factory=list)
    commands: dict[str, "KnownCommand"] = field(default_factory=dict)

    @classmethod
    def of(cls, record: dict[str, Any]) -> "KnownCommand":
        """Make a command from a dictionary that `asdict` returned."""
        options, arguments = ([KnownOption(**one) for one in record[name]] for name in ("options", "arguments"))
        commands = {name: cls.of(one) for name, one in record["commands"].items()}
        return cls(record["help"], options, arguments, commands)


def remembered() -> KnownCommand | None:
    """Return the cached commands of the installed version; None if there is no valid cache for this version."""
    try:
        record = json.loads(read_small(cache_root() / _FILE) or "{}")
        return KnownCommand.of(record["program"]) if record["of"] == _installed() else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def remember(program: KnownCommand) -> None:
    """Write the commands to the cache for the next completion. If the cache cannot be written, nothing happens."""
    replace_small(cache_root() / _FILE, json.dumps({"of": _installed(), "program": asdict(program)}))


def _installed() -> list[Any]:
    """Return the modification times, with paths, of the Python files in the folders of `_DECIDE`, and of the folders of
    installed packages, because a package may add methods."""
    files = sorted(path for folder in _DECIDE for path in _files(_PACKAGE / folder))
    packages = [path for path in sys.path if path.endswith("-packages") and os.path.isdir(path)]
    return [[path, os.stat(path).st_mtime_ns] for path in (*files, *packages)]


def _files(folder: Path) -> Iterator[str]:
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from _files(Path(entry.path))
        elif entry.name.endswith(".py"):
            yield entry.path
