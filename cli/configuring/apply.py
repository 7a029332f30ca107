"""Give a command, or each command of a group, the defaults of the project's file."""

from collections.abc import Iterable, Mapping
from typing import Any

from sparsekv.cli.configuring.defaults import OptionDefaults, check_tables, command_defaults
from sparsekv.cli.configuring.project_file import ProjectFile, project_file
from sparsekv.cli.configuring.sources import with_defaults
from sparsekv.formats.errors import UsageError


def apply_defaults(name: str, command: Any, commands: Iterable[str]) -> dict[str, Any]:
    """The `default_map` of a command, whose values' sources its errors name from now on.

    A command without options reads no file.

    Args:
        commands: the names that tables of the file may have.

    Raises:
        UsageError: the file cannot be read, or something in it is not possible.
    """
    leaves = dict(leaf_commands((name,), command))
    file = project_file() if any(_has_options(one) for one in leaves.values()) else None
    if file is not None:
        check_tables(file, commands)
    nested: dict[str, Any] = {}
    for path, leaf in leaves.items():
        defaults = (
            OptionDefaults() if file is None else command_defaults(file, path, leaf, table_of(file, path, leaves))
        )
        with_defaults(leaf, defaults)
        inner = nested
        for part in path[1:]:
            inner = inner.setdefault(part, {})
        inner.update(defaults.values)
    return nested


def leaf_commands(path: tuple[str, ...], command: Any) -> Iterable[tuple[tuple[str, ...], Any]]:
    """The command itself, or those of a group, with their names."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield path, command
    for name, one in inner.items():
        yield from leaf_commands((*path, name), one)


def table_of(file: ProjectFile, path: tuple[str, ...], known: Iterable[tuple[str, ...]]) -> Mapping[str, Any]:
    """The file's table of a command, empty without one; UsageError where a table on the way has something else."""
    table: dict[str, Any] = file.tables
    for depth, part in enumerate(path):
        inside = {other[depth] for other in known if other[:depth] == path[:depth]}
        for key in table if depth else ():
            if key not in inside:
                below = ", ".join(f"[{'.'.join((*path[:depth], name))}]" for name in sorted(inside))
                raise UsageError(
                    f"{file.where(*path[:depth], key)}: {key} is nothing of {path[0]}; its tables are {below}"
                )
        table = table.get(part, {})
        if not isinstance(table, dict):
            raise UsageError(f"{file.where(*path[: depth + 1])}: {part} is a command; write [{'.'.join(path)}] instead")
    return table


def _has_options(command: Any) -> bool:
    return any(one.param_type_name == "option" for one in command.params)
