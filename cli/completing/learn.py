"""Read the options and arguments of the commands for completion. This imports the modules of the commands."""

import re
from pathlib import Path
from typing import Any

from sparsekv.cli.completing.candidates import KnownCommand, KnownOption
from sparsekv.cli.configuring.project_file import kinds_of
from sparsekv.cli.configuring.sources import owners

_LITERAL = re.compile(r"[a-z0-9][\w.:-]*")


def learn(command: Any, ctx: Any) -> KnownCommand:
    """Return the description of a command for completion, with all its subcommands.

    Args:
        ctx: the context of the command's parent; for the top command, its own context.
    """
    kinds = {} if hasattr(command, "list_commands") else kinds_of(command)
    found = [(one, kinds.get(one.name)) for one in command.get_params(ctx)]
    options = [known for one, kind in found if one.param_type_name == "option" for known in _options(one, kind, ctx)]
    arguments = [_known([], one, kind, ctx) for one, kind in found if one.param_type_name == "argument"]
    names = command.list_commands(ctx) if hasattr(command, "list_commands") else []
    below = {name: learn(command.get_command(ctx, name), ctx) for name in names}
    return KnownCommand(_first_sentence(command.help or ""), options, arguments, below)


def _options(option: Any, kind: Any, ctx: Any) -> list[KnownOption]:
    return [_known(names, option, kind, ctx) for names in (option.opts, option.secondary_opts) if names]


def _known(names: list[str], parameter: Any, kind: Any, ctx: Any) -> KnownOption:
    value, choices = ("none", []) if getattr(parameter, "is_flag", False) else _value(parameter, kind, ctx)
    repeatable = bool(getattr(parameter, "multiple", False))
    about = _first_sentence(getattr(parameter, "help", "") or "")
    return KnownOption(names, about, value, choices, repeatable, sorted(owners(parameter)))


def _value(parameter: Any, kind: Any, ctx: Any) -> tuple[str, list[str]]:
    """Return the kind of a parameter's value, as in `KnownOption`, and the values that the parameter's metavar and
    completion function list."""
    metavar = parameter.metavar or ""
    choices = [part for part in metavar.split("|") if _LITERAL.fullmatch(part)]
    choices += [str(item.value) for item in parameter.shell_complete(ctx, "") if item.type == "plain"]
    if parameter.name in ("index", "model"):
        return parameter.name, choices
    if choices:
        return "names", list(dict.fromkeys(choices))
    if "FOLDER" in metavar or parameter.name == "output":
        return "folder", []
    is_file = kind is Path or re.search(r"FILE|DOC|MORE|\.skv", metavar) or parameter.name.endswith("_file")
    return ("file" if is_file else "any"), []


def _first_sentence(text: str) -> str:
    first = " ".join(text.split("\n\n")[0].replace("\b", "").split())
    return re.split(r"(?<=[a-z)`*])[.;:] ", first)[0].rstrip(".")
