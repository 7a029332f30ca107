"""The defaults that a project's file gives a command, checked against the command's options."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparsekv.cli.configuring.option_values import (
    index_path,
    kinds_of,
    long_name,
    model_name,
    refuse_calls_own,
    refuse_type,
    typed,
)
from sparsekv.cli.configuring.project_file import ProjectFile
from sparsekv.formats.errors import UsageError
from sparsekv.formats.suggestions import suggestion

SHARED = ("index", "model", "device", "dtype")
"""Keys for all commands, each with an environment variable."""


def variable(key: str) -> str:
    """The environment variable of a key for all commands, such as `SPARSEKV_INDEX`."""
    return f"SPARSEKV_{key.upper()}"


@dataclass(frozen=True)
class OptionDefaults:
    """Values from a file for a command's parameters, by their names in Python, and where each stands."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)


def check_tables(file: ProjectFile, commands: Iterable[str]) -> None:
    """Raise UsageError for a table that is no command's, or a key outside of tables that all commands cannot have."""
    commands = [*commands]
    for key, value in file.tables.items():
        if isinstance(value, dict) and key not in commands:
            near = suggestion(key, commands)
            raise UsageError(f"{file.where(key)}: there is no command {key}{near}; name one of `sparsekv --help`")
        if not isinstance(value, dict) and key not in SHARED:
            near = suggestion(key, SHARED)
            raise UsageError(
                f"{file.where(key)}: {key} is no default of all commands{near}; these are {', '.join(SHARED)}; options "
                "of one command stand below its name in brackets, such as [generate]"
            )
        if key in SHARED and not isinstance(value, str | dict):
            refuse_type(f"{file.where(key)}: {key}", value, "text in quotes")


def command_defaults(
    file: ProjectFile, name: tuple[str, ...], command: Any, table: Mapping[str, Any]
) -> OptionDefaults:
    """What the file has for a command: its table, and before that the keys for all commands.

    Args:
        name: the command's, such as `("models", "list")`; keys of its table have it in front.

    Raises:
        UsageError: an option that the command does not have or that no file may set, or a value of the wrong type.
    """
    options = {long_name(one): one for one in command.params if one.param_type_name == "option"}
    for key in table:
        if key not in options:
            near = suggestion(key, options)
            raise UsageError(
                f"{file.where(*name, key)}: {' '.join(name)} has no option {key}{near}; see `sparsekv "
                f"{' '.join(name)} --help`"
            )
    found = {
        key: (file.where(key), value) for key, value in file.tables.items() if _takes_shared(options.get(key), key)
    }
    found |= {key: (file.where(*name, key), value) for key, value in table.items()}
    defaults, kinds = OptionDefaults(), kinds_of(command)
    for key, (where, value) in found.items():
        option = options[key]
        refuse_calls_own(option, kinds[option.name], where)
        defaults.values[option.name] = _meant(key, typed(option, kinds[option.name], value, where), file, where)
        defaults.origins[option.name] = where
    return defaults


def _takes_shared(option: Any, key: str) -> bool:
    return key in SHARED and option is not None and option.envvar == variable(key)


def _meant(key: str, value: Any, file: ProjectFile, where: str) -> Any:
    if key == "index":
        return index_path(value, file, where)
    return model_name(value, file) if key == "model" else value
