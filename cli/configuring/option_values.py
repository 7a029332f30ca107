"""Check one value of `sparsekv.toml` against the option that it is the default of."""

import inspect
import os
import re
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NoReturn, get_args, get_origin

from sparsekv.cli.common.values import check_value
from sparsekv.cli.configuring.project_file import ProjectFile
from sparsekv.formats.errors import UsageError

CALLS_OWN = ("special-tokens", "force", "rebuild", "again", "keep-indices", "reset", "ray")
"""Options that decide what is written, replaced or trusted, a cluster too: the person who calls decides these."""
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
    """An option's long name without dashes, such as `max-new-tokens`."""
    return str(max(option.opts, key=len)).lstrip("-")


def kinds_of(command: Any) -> dict[str, Any]:
    """By parameter: the type of its value, or of each of its values, from the command's signature."""
    signature = inspect.signature(command.callback)
    return {name: _kind(parameter.annotation) for name, parameter in signature.parameters.items()}


def _kind(annotation: Any) -> Any:
    while args := get_args(annotation):
        if not isinstance(annotation, UnionType) and get_origin(annotation) not in (Annotated, list):
            break
        annotation = args[0]
    return annotation


def refuse_calls_own(option: Any, kind: Any, where: str) -> None:
    """Raise UsageError for an option that no file may set: it names a file, or decides what is written or trusted."""
    name = long_name(option)
    if name == "index":
        return
    reason = "it is decided call by call" if name in CALLS_OWN else ""
    if kind is Path or name.endswith("-file") or _NAMES_A_FILE.search(option.metavar or ""):
        reason = "it names a file"
    if reason:
        raise UsageError(f"{where}: {name} is not taken from a file, for {reason}; give --{name} on the command line")


def typed(option: Any, kind: Any, value: Any, where: str) -> Any:
    """A value as the option takes it; a single one is a list where the option is repeatable.

    Raises:
        UsageError: it is of another type.
    """
    if option.multiple:
        return [_typed(option, kind, one, where) for one in (value if isinstance(value, list) else [value])]
    return _typed(option, kind, value, where)


def _typed(option: Any, kind: Any, value: Any, where: str) -> Any:
    accepted = {bool: (bool,), int: (int,), float: (int, float), Path: (str,)}.get(kind, (str, int, float))
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        refuse_type(f"{where}: {long_name(option)}", value, _TAKES.get(kind, _TAKES[str]))
    try:
        check_value(f"--{long_name(option)}", value)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    return value if kind in (bool, int, float) else str(value)


def refuse_type(what: str, value: Any, takes: str) -> NoReturn:
    """Raise UsageError for a value of the wrong type, which says what it is and what to write."""
    found = next((text for one, text in _IS.items() if isinstance(value, one)), "a date or time")
    raise UsageError(f"{what} is {found}; write {takes}")


def index_path(value: str, file: ProjectFile, where: str) -> str:
    """An index's path from the current folder, which the file has from its own.

    Raises:
        UsageError: it lies elsewhere than below the file's folder, through a link too: whoever wrote the file must not
            choose which of the user's indices is changed.
    """
    folder = file.path.parent
    # What is returned is looked at: in `link/../index` the two dots are of where the link goes.
    path = Path(os.path.normpath(folder / value))
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):
        inside = False
    if not inside:
        raise UsageError(
            f"{where}: the index {value} lies outside of the file's folder; name it with --index or SPARSEKV_INDEX"
        )
    return os.path.relpath(path)


def model_name(value: str, file: ProjectFile) -> str:
    """A model's name: the whole path of a folder, which may be written from the file's own; else as it is."""
    try:
        folder = file.path.parent / Path(value).expanduser()
        return str(folder.resolve()) if value.strip() and folder.is_dir() else value
    except (OSError, ValueError, RuntimeError):
        return value
