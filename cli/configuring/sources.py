"""Precedence of option values from the command line, the environment and `sparsekv.toml`."""

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sparsekv.cli.common.options import ANY_METHOD, METHODS_OF, GroupedCommand, refuse_repeated, refuse_unusable
from sparsekv.cli.configuring.project_file import (
    SHARED,
    ProjectFile,
    check_tables,
    command_defaults,
    long_name,
    project_file,
    variable,
)
from sparsekv.formats.documents.extracted import DOCX, PDF, kind_of
from sparsekv.formats.errors import UsageError

EITHER = (
    ("schedule", "budget"),
    ("schedule", "step"),
    ("json", "csv", "latex", "markdown"),
    ("target-recall", "target-error", "target-perplexity"),
)
"""Groups of options that exclude each other. An option on the command line outranks the default of `sparsekv.toml` for
another option of its group."""
ALONE: dict[str, tuple[Any, tuple[str, ...]]] = {
    "method": (
        "dense",
        (
            "budget",
            "schedule",
            "residual",
            "prefill",
            "prefill-budget",
            "guard",
            "gauge",
            "dense-layers",
            "placement",
            "ahead",
        ),
    ),
    "temperature": (0, ("top-p", "top-k")),
    "reset": (True, ("target-recall", "target-error", "target-perplexity", "dry-run")),
}
"""Options with a value that makes other options meaningless. If the command line sets such a value, the defaults of
`sparsekv.toml` for the other options are ignored, except those that a method chosen later uses (`_counts_later`)."""
NAMING_METHODS = ("method", "prefill", "question-prefill")
_TELLING = 3
"""Minimum number of characters of a value that identifies its option in an error message."""


def source_of(ctx: Any, name: str) -> str:
    """Return where a parameter's value comes from: COMMANDLINE, ENVIRONMENT, DEFAULT_MAP (sparsekv.toml) or DEFAULT."""
    source = ctx.get_parameter_source(name)
    return "DEFAULT" if source is None else str(source.name)


def on_command_line(ctx: Any, name: str) -> bool:
    """Whether the user gave the option in this call."""
    return source_of(ctx, name) == "COMMANDLINE"


def note_idle_encoding(ctx: Any, documents: Sequence[str], *, quiet: bool) -> None:
    """Print a note if --encoding is on the command line and all of the documents are PDF or DOCX files, which have
    encodings of their own."""
    if documents and on_command_line(ctx, "encoding") and all(kind_of(one) in (PDF, DOCX) for one in documents):
        from sparsekv.cli.common.console import note  # the module imports rich

        told = f"--encoding {ctx.params['encoding']} has no effect on {documents[0]}"
        note(f"{told}: PDF and DOCX files have encodings of their own", quiet=quiet)


def typed_options(ctx: Any, excluded: Collection[str] = ()) -> list[str]:
    """Return the options that the user gave in this call, as words of a command line, except the `excluded` ones."""
    words = list[str]()
    for one in ctx.command.params:
        if one.param_type_name != "option" or one.name in excluded or not on_command_line(ctx, one.name):
            continue
        value = ctx.params[one.name]
        if isinstance(value, bool):
            words.append((one.opts if value else one.secondary_opts)[0])
        else:
            values = value if one.multiple else [value]
            words += [word for each in values for word in (f"--{long_name(one)}", str(each))]
    return words


LEFT_OUT = "sparsekv.left_out"
"""Key in a context's `meta`. Its entry has the values of `sparsekv.toml` that the call ignores, by parameter."""
ORIGINS = "sparsekv.origins"
"""Key in a context's `meta`. Its entry has the file and line of each default, by command and by parameter."""


class Command(GroupedCommand):
    """A command that refuses unusable values. Its errors name the source of a value that is not from the command line.

    Defaults of `sparsekv.toml` that other options outrank are ignored. A model that this file names is refused if the
    user has never given it with --model.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = [*args]
        with self._naming_sources(ctx):
            rest = super().parse_args(ctx, args)  # parse first, because --help prints and exits here
            refuse_repeated(self, ctx, given)
        return rest

    def invoke(self, ctx: Any) -> Any:
        options = {long_name(one): one for one in self.params if one.param_type_name == "option"}
        _leave_out_excluded(ctx, options)
        _leave_out_others_methods(ctx, options)
        _leave_out_unread(ctx, options)
        if "model" in ctx.params and source_of(ctx, "model") == "DEFAULT_MAP":
            _refuse_unnamed_model(ctx.params["model"], self._origins(ctx)["model"])
        with self._naming_sources(ctx):
            refuse_unusable(self, ctx)
            return super().invoke(ctx)

    def _origins(self, ctx: Any) -> dict[str, str]:
        found: dict[str, str] = ctx.meta.get(ORIGINS, {}).get(self, {})
        return found

    @contextmanager
    def _naming_sources(self, ctx: Any) -> Iterator[None]:
        """Within the context, add a note to an error for each option that its message mentions, by name or by value, if
        the environment or `sparsekv.toml` set the option. The note names the variable, or the file and line."""
        try:
            yield
        except Exception as error:
            format_message = getattr(error, "format_message", None)
            message = str(error) if format_message is None else format_message()
            for option in (one for one in self.params if one.param_type_name == "option"):
                source, name = source_of(ctx, option.name), f"--{long_name(option)}"
                of_file = self._origins(ctx).get(option.name)
                origin = {"ENVIRONMENT": option.envvar, "DEFAULT_MAP": of_file}.get(source)
                values = _texts(ctx, option, source)
                if origin and _mentions(message, name, values):
                    error.add_note(" ".join([name, *values, "comes from", str(origin)]))
            raise


def _leave_out_excluded(ctx: Any, options: dict[str, Any]) -> None:
    for names in EITHER:
        held = [options[name] for name in names if name in options]
        if any(on_command_line(ctx, one.name) for one in held):
            _leave_out(ctx, held)
    for name, (value, others) in ALONE.items():
        one = options.get(name)
        if one is not None and on_command_line(ctx, one.name) and ctx.params[one.name] == value:
            _leave_out(ctx, [options[other] for other in others if other in options and not _counts_later(ctx, other)])


def _counts_later(ctx: Any, option: str) -> bool:
    """Whether an option's value is used later, when a user of a chat switches the method or a request names a method.

    A chat that begins with dense attention refuses a `prefill` that names a method.
    """
    if ctx.command.name == "serve":
        return option in ("placement", "prefill")
    own_prefill = option == "prefill" and ctx.params["prefill"] == "own"
    return ctx.command.name == "chat" and (option == "placement" or own_prefill)


def _leave_out_others_methods(ctx: Any, options: dict[str, Any]) -> None:
    """Ignore values of `sparsekv.toml` for options that belong only to methods that are not chosen.

    Does nothing if `--method` is not set, or if it is one of ANY_METHOD.
    """
    chosen = _named(ctx, NAMING_METHODS)
    if not ctx.params.get("method") or ANY_METHOD & chosen:
        return
    _leave_out(ctx, [one for one in options.values() if (owned := owners(one)) and not owned & chosen])


def _leave_out_unread(ctx: Any, options: dict[str, Any]) -> None:
    """Ignore values of `sparsekv.toml` for methods' options that no method reads, given the other options' values."""
    of_file = [one for one in options.values() if owners(one) and source_of(ctx, one.name) == "DEFAULT_MAP"]
    if not of_file:
        return
    from sparsekv.runtime.attention.config import Own  # the modules import torch
    from sparsekv.runtime.selection.interface import methods
    from sparsekv.runtime.selection.registry import unread

    chosen, asking, answering = (_named(ctx, names) for names in (NAMING_METHODS, NAMING_METHODS[1:], ("method",)))
    # Without --method, the method of the answers is not known here.
    alone = asking - answering if answering and not ANY_METHOD & answering else set[str]()
    for option in of_file:
        names = [name for name in owners(option) & chosen or owners(option) if name in methods()]
        having = {name: methods()[name] for name in names if hasattr(methods()[name], option.name)}
        decoding = set[str]() if Own.name in asking else having.keys() - asking
        answers = ctx.command.name != "recall-report"
        why = [
            unread(one, option.name, ctx.params, decodes=name in decoding, asks=name in alone, answers=answers)
            for name, one in having.items()
        ]
        if why and all(why):
            _leave_out(ctx, [option])


def _named(ctx: Any, options: Iterable[str]) -> set[str]:
    """Return the values of these options, each of which takes one name or several."""
    given = (ctx.params.get(name.replace("-", "_")) or [] for name in options)
    return {name for value in given for name in ([value] if isinstance(value, str) else value)}


def owners(option: Any) -> set[str]:
    """Return the methods that an option belongs to; empty for the command's own option."""
    panel = _panel(option)
    names = panel.removeprefix(METHODS_OF).split(", ") if panel.startswith(METHODS_OF) else []
    return {name.split(" ")[-1] for name in names}


def _panel(option: Any) -> str:
    return str(getattr(option, "rich_help_panel", None) or "")


def _leave_out(ctx: Any, options: list[Any]) -> None:
    for option in options:
        if source_of(ctx, option.name) == "DEFAULT_MAP":
            ctx.meta.setdefault(LEFT_OUT, {}).setdefault(option.name, ctx.params[option.name])
            ctx.params[option.name] = option.default


def left_out(ctx: Any) -> dict[str, Any]:
    """Return the values of `sparsekv.toml` that this call ignores, by parameter."""
    found: dict[str, Any] = ctx.meta.get(LEFT_OUT, {})
    return found


def _refuse_unnamed_model(name: str, origin: str) -> None:
    from sparsekv.formats.models.find import may_be_loaded  # the module imports torch

    if not may_be_loaded(name):
        raise UsageError(
            f"{origin} names the model {name}, which you have not yet given with --model; if "
            f"you trust it, add --model {shlex.quote(name)} once"
        )


def _texts(ctx: Any, option: Any, source: str) -> list[str]:
    """Return, as text, the values that an environment variable sets for an option if `source` is ENVIRONMENT; otherwise
    those that `sparsekv.toml` sets. Empty for a flag."""
    value = option.resolve_envvar_value(ctx) if source == "ENVIRONMENT" else ctx.lookup_default(option.name)
    values = value if isinstance(value, list) else [value]
    return [str(one) for one in values if one is not None and not isinstance(one, bool)]


def _mentions(message: str, name: str, values: list[str]) -> bool:
    telling = [name, *(value for value in values if len(value) >= _TELLING)]
    return any(re.search(rf"(?<![\w-]){re.escape(one)}(?![\w-])", message) for one in telling)


def apply_defaults(ctx: Any, name: str, command: Any, commands: Iterable[str]) -> None:
    """Set the defaults of `sparsekv.toml` for a command, and record the line of each default for error messages. For a
    command without options, the file is not read.

    Args:
        ctx: the context of the command group, which gets the defaults and lines.
        name: the command's name; for a group, the defaults of all its commands are set.
        commands: names of all commands, which are the allowed names of the file's tables.

    Raises:
        UsageError: the file cannot be read, or its content is not valid.
    """
    leaves = dict(leaf_commands((name,), command))
    has_options = any(one.param_type_name == "option" for leaf in leaves.values() for one in leaf.params)
    file = project_file() if has_options else None
    if file is None:
        return
    check_tables(file, commands)
    ctx.default_map, origins = {}, ctx.meta.setdefault(ORIGINS, {})
    for path, leaf in leaves.items():
        defaults = command_defaults(file, path, leaf, table_of(file, path, leaves))
        origins[leaf] = defaults.origins
        inner = ctx.default_map
        for part in path:
            inner = inner.setdefault(part, {})
        inner.update(defaults.values)


def leaf_commands(path: tuple[str, ...], command: Any) -> Iterable[tuple[tuple[str, ...], Any]]:
    """Yield the command itself, or each command of a group, with its path of names."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield path, command
    for name, one in inner.items():
        yield from leaf_commands((*path, name), one)


def table_of(file: ProjectFile, path: tuple[str, ...], known: Iterable[tuple[str, ...]]) -> Mapping[str, Any]:
    """Return the file's table for a command; empty if there is none. Raises UsageError if the table of a group on the
    path has a key that is no command, or if a name on the path has a value that is no table."""
    table: dict[str, Any] = file.tables
    for depth, part in enumerate(path):
        inside = {other[depth] for other in known if other[:depth] == path[:depth]}
        for key in table if depth else ():
            if key not in inside:
                below = ", ".join(f"[{'.'.join((*path[:depth], name))}]" for name in sorted(inside))
                raise UsageError(
                    f"{file.where(*path[:depth], key)}: {key} is not a command of {path[0]}; its commands are {below}"
                )
        table = table.get(part, {})
        if not isinstance(table, dict):
            raise UsageError(f"{file.where(*path[: depth + 1])}: {part} is a command; write [{'.'.join(path)}] instead")
    return table


@dataclass(frozen=True)
class SetDefault:
    """A default that a file or an environment variable sets: an option's value, or the cache folder.

    Attributes:
        command: the command of the option; None for all commands.
        file, line: where the file sets the value; None for a variable, and `line` is None if it is not known.
        variable: the environment variable that sets the value; None for a file.
        used: False if an environment variable outranks a value of the file.
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
        """The variable, or the file and line, that sets the default, as text for the user."""
        return self.variable or f"{self.file}" + ("" if self.line is None else f", line {self.line}")


def set_defaults(commands: Iterable[str], get_command: Callable[[str], Any]) -> tuple[str | None, list[SetDefault]]:
    """Return the path of `sparsekv.toml`, relative to the current folder, and all defaults that are set.

    The path is None if there is no such file. Defaults of the environment come before defaults of the file.

    Raises:
        UsageError: the file cannot be read, or its content is not valid.
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
