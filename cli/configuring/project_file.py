"""Read a project's defaults from `sparsekv.toml`: find the file, and check its keys and values against the options."""

import inspect
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NoReturn, get_args, get_origin

from sparsekv.cli.common.commands import moved
from sparsekv.cli.common.options import refuse_unusable_value
from sparsekv.formats.documents.document import decode_text
from sparsekv.formats.errors import UsageError, reason_of, suggestion

NAME = "sparsekv.toml"
MOST_BYTES = 2**16
"""Largest size of `sparsekv.toml` in bytes: someone else may have made the folder and the file."""
_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?")
_KEY = re.compile(r"\s*([\w.'\" -]+?)\s*=")


@dataclass(frozen=True)
class ProjectFile:
    """A project's defaults: the file's path, its TOML tables, and the line number of each key by the key's path."""

    path: Path
    tables: dict[str, Any]
    lines: dict[tuple[str, ...], int]

    @property
    def shown(self) -> str:
        """The file's path relative to the current folder, for messages."""
        return os.path.relpath(self.path)

    def where(self, *keys: str) -> str:
        """Return the file and line of a key, such as `sparsekv.toml, line 3`; the file alone if the line is not
        known."""
        return f"{self.shown}, line {self.lines[keys]}" if keys in self.lines else self.shown


def project_file() -> ProjectFile | None:
    """Return the nearest `sparsekv.toml`, or None. The search goes from the current folder upwards to the home folder
    or the root.

    Raises:
        UsageError: the file is not a regular file, cannot be read, is larger than MOST_BYTES, or is not valid TOML.
    """
    path = _find()
    return None if path is None else _parse(path, _read(path))


def _find() -> Path | None:
    try:
        here = Path.cwd()
    except OSError:  # the current folder was removed
        return None
    home = Path(os.path.realpath(os.path.expanduser("~")))  # as the current folder, which has no links
    for folder in (here, *here.parents):
        if os.path.lexists(folder / NAME):
            return folder / NAME
        if folder == home:
            break
    return None


def _read(path: Path) -> str:
    shown = os.path.relpath(path)
    try:
        # O_NONBLOCK: a stranger may have made the file a pipe without a writer, and open() would wait forever.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(
                    f"{shown} is not a file; rename or remove it, or replace it by a file with the project's defaults"
                )
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{shown} cannot be read: {reason_of(error)}; make it readable, or move it away") from None
    if len(data) > MOST_BYTES:
        raise UsageError(f"{shown} is longer than {MOST_BYTES >> 10} KiB; keep only the project's defaults in it")
    return decode_text(data, shown)


def _parse(path: Path, text: str) -> ProjectFile:
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UsageError(f"{os.path.relpath(path)} is not valid TOML: {reason}; correct it, or move it away") from None
    return ProjectFile(path, tables, _lines(text))


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Return the line number of each table and key at the start of a line. `tomllib` does not report line numbers."""
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


CALLS_OWN = ("special-tokens", "force", "rebuild", "again", "keep-indices", "reset", "ray", "host", "cors")
"""Options that `sparsekv.toml` may not set, so that the user must give them in each call. They determine which files
are written or replaced, which programs are trusted (a Ray cluster), or who may send requests to a server."""
_NAMES_A_FILE = re.compile(r"FILE|FOLDER|\.skv")
_TAKES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text in quotes, or a number",
    Path: "a path in quotes",
}
_IS = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array", dict: "a table"}


def long_name(option: Any) -> str:
    """Return an option's long name without dashes, such as `max-new-tokens`."""
    return str(max(option.opts, key=len)).lstrip("-")


def kinds_of(command: Any) -> dict[str, Any]:
    """Return the type of each parameter in the command's signature, by name.

    For a list it is the type of the elements, and for `T | None` it is T.
    """
    signature = inspect.signature(command.callback)
    return {name: _kind(parameter.annotation) for name, parameter in signature.parameters.items()}


def _kind(annotation: Any) -> Any:
    while args := get_args(annotation):
        if not isinstance(annotation, UnionType) and get_origin(annotation) not in (Annotated, list):
            break
        annotation = args[0]
    return annotation


def refuse_calls_own(option: Any, kind: Any, where: str) -> None:
    """Raise UsageError for an option that `sparsekv.toml` may not set: one of CALLS_OWN, or an option that names a file
    or folder. Only `--index` is allowed although it names a folder."""
    name = long_name(option)
    if name == "index":
        return
    reason = "it must be given with each call" if name in CALLS_OWN else ""
    if kind is Path or name.endswith("-file") or _NAMES_A_FILE.search(option.metavar or ""):
        reason = "it names a file"
    if reason:
        raise UsageError(
            f"{where}: {name} is not read from a file, because {reason}; give --{name} on the command line"
        )


def typed(option: Any, kind: Any, value: Any, where: str) -> Any:
    """Return a value of `sparsekv.toml` as an option's default.

    It is a boolean or number if the option has this type, otherwise text. For a repeatable option, a single value
    becomes a list.

    Raises:
        UsageError: the value has another type, or no command can use it.
    """
    if option.multiple:
        return [_typed(option, kind, one, where) for one in (value if isinstance(value, list) else [value])]
    return _typed(option, kind, value, where)


def _typed(option: Any, kind: Any, value: Any, where: str) -> Any:
    accepted = {bool: (bool,), int: (int,), float: (int, float), Path: (str,)}.get(kind, (str, int, float))
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        refuse_type(f"{where}: {long_name(option)}", value, _TAKES.get(kind, _TAKES[str]))
    try:
        refuse_unusable_value(f"--{long_name(option)}", value)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    return value if kind in (bool, int, float) else str(value)


def refuse_type(what: str, value: Any, takes: str) -> NoReturn:
    """Raise UsageError for a value of the wrong type. The message names the value's type and the expected type."""
    found = next((text for one, text in _IS.items() if isinstance(value, one)), "a date or time")
    raise UsageError(f"{what} is {found}; write {takes}")


def index_path(value: str, file: ProjectFile, where: str) -> str:
    """Return the path, relative to the current folder, of an index that `sparsekv.toml` names.

    Args:
        value: the index's path as the file has it, relative to the file's folder.
        where: the file and line, for the error message.

    Raises:
        UsageError: the index is not below the file's folder, also if a link leads out of the folder. The author of the
            file must not choose an index elsewhere on the user's disk.
    """
    folder = file.path.parent
    # The path is normalised before the check. The system would read `link/../index` from the link's target.
    path = Path(os.path.normpath(folder / value))
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):
        inside = False
    if not inside:
        raise UsageError(
            f"{where}: the index {value} is outside the folder of this file; name it with --index or SPARSEKV_INDEX"
        )
    return os.path.relpath(path)


def model_name(value: str, file: ProjectFile) -> str:
    """Return the absolute path of a model's folder, whose name may be relative to the file's folder. Return a name that
    is no folder unchanged."""
    try:
        folder = file.path.parent / Path(value).expanduser()
        return str(folder.resolve()) if value.strip() and folder.is_dir() else value
    except (OSError, ValueError, RuntimeError):
        return value


SHARED = ("index", "model", "device", "dtype")
"""Keys that set a default for all commands. Each key also has an environment variable."""


def variable(key: str) -> str:
    """Return the environment variable of a key of `SHARED`, such as `SPARSEKV_INDEX`."""
    return f"SPARSEKV_{key.upper()}"


@dataclass(frozen=True)
class OptionDefaults:
    """Values of `sparsekv.toml` for a command's parameters, and the file and line of each, by Python parameter name."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)


def check_tables(file: ProjectFile, commands: Iterable[str]) -> None:
    """Raise UsageError for a table that names no command, and for a top-level key that is not in SHARED or that has a
    value other than text."""
    commands = [*commands]
    for key, value in file.tables.items():
        if isinstance(value, dict) and key not in commands:
            near = suggestion(key, commands)
            raise UsageError(
                f"{file.where(key)}: there is no command {key}{near}; see `sparsekv --help` for the commands"
            )
        if not isinstance(value, dict) and key not in SHARED:
            near = suggestion(key, SHARED)
            raise UsageError(
                f"{file.where(key)}: {key} is not an option that all commands share{near}; those are "
                f"{', '.join(SHARED)}; write an option of one command below the command's name in brackets, such "
                "as [generate]"
            )
        if key in SHARED and not isinstance(value, str | dict):
            refuse_type(f"{file.where(key)}: {key}", value, "text in quotes")


def command_defaults(
    file: ProjectFile, name: tuple[str, ...], command: Any, table: Mapping[str, Any]
) -> OptionDefaults:
    """Return the file's defaults for a command. The command's own table overrides the keys for all commands.

    Args:
        name: the command's names, such as `("models", "list")`; in the file they are the path of its table.

    Raises:
        UsageError: the command has no such option, a file may not set the option, a value has the wrong type, or an
            index is outside the file's folder.
    """
    options = {long_name(one): one for one in command.params if one.param_type_name == "option"}
    for key in table:
        if key not in options:
            now = moved(name[0], key)
            near = suggestion(key, options) if now is None else f" any more: it belongs under [{now}]"
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
