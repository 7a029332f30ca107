"""All defaults that are set here, by the project's file and by the environment."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sparsekv.cli.configuring.apply import leaf_commands, table_of
from sparsekv.cli.configuring.defaults import SHARED, check_tables, command_defaults, variable
from sparsekv.cli.configuring.project_file import ProjectFile, project_file


@dataclass(frozen=True)
class SetDefault:
    """One default as it is written: an option's of a command, of all if `command` is None, or the cache's folder.

    It stands in a line of the file, or in a variable. used: no variable outranks it.
    """

    command: str | None
    option: str
    value: Any
    file: str | None
    line: int | None
    variable: str | None
    used: bool

    @property
    def origin(self) -> str:
        """Where it stands, for a person."""
        return self.variable or f"{self.file}" + ("" if self.line is None else f", line {self.line}")


def set_defaults(commands: Iterable[str], get_command: Callable[[str], Any]) -> tuple[str | None, list[SetDefault]]:
    """The file's path from the current folder, None without one, and the defaults: first the environment's.

    Raises:
        UsageError: the file cannot be read, or something in it is not possible.
    """
    file = project_file()
    found = [*_from_environment()]
    if file is not None:
        check_tables(file, commands)
        found += _from_file(file, get_command)
    return None if file is None else file.shown, found


def _from_environment() -> Iterator[SetDefault]:
    for option in (*SHARED, "cache"):
        name = variable(option)
        if value := os.environ.get(name):
            yield SetDefault(None, option, value, None, None, name, used=True)


def _from_file(file: ProjectFile, get_command: Callable[[str], Any]) -> Iterator[SetDefault]:
    for key, value in file.tables.items():
        if not isinstance(value, dict):
            yield _of_file(file, (), key, value)
    for name in (key for key, value in file.tables.items() if isinstance(value, dict)):
        leaves = dict(leaf_commands((name,), get_command(name)))
        for path, leaf in leaves.items():
            table = table_of(file, path, leaves)
            command_defaults(file, path, leaf, table)
            for key, value in table.items():
                yield _of_file(file, path, key, value)


def _of_file(file: ProjectFile, path: tuple[str, ...], key: str, value: Any) -> SetDefault:
    outranked = key in SHARED and bool(os.environ.get(variable(key)))
    line = file.lines.get((*path, key))
    return SetDefault(" ".join(path) or None, key, value, file.shown, line, None, used=not outranked)
