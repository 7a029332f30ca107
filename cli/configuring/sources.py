"""Where the values of a command's options come from: obey what outranks a default, and name its source in errors."""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparsekv.cli.common.help_panels import METHODS_OF
from sparsekv.cli.configuring.defaults import OptionDefaults
from sparsekv.cli.configuring.option_values import long_name
from sparsekv.formats.errors import UsageError

EITHER = (
    ("schedule", "budget"),
    ("schedule", "step"),
    ("json", "csv"),
    ("target-recall", "target-error", "target-perplexity"),
)
"""Options that exclude each other: one on the command line outranks a default of another."""
ALONE: dict[str, tuple[Any, tuple[str, ...]]] = {
    "method": ("dense", ("budget", "residual", "guard", "gauge", "ahead", "placement", "prefill", "prefill-budget")),
    "temperature": (0, ("top-p", "top-k")),
    "reset": (True, ("target-recall", "target-error", "target-perplexity", "dry-run")),
}
"""Options that with this value leave others nothing to say: given so on the command line, they outrank these."""
NAMING_METHODS = ("method", "prefill", "question-prefill")
_TELLING = 3
"""Letters from which on a value tells a reader of an error which option is meant."""


def source_of(ctx: Any, name: str) -> str:
    """Where a parameter's value comes from: COMMANDLINE, ENVIRONMENT, DEFAULT_MAP (the file) or DEFAULT."""
    source = ctx.get_parameter_source(name)
    return "DEFAULT" if source is None else str(source.name)


def on_command_line(ctx: Any, name: str) -> bool:
    """Whether the user gave the option in this call."""
    return source_of(ctx, name) == "COMMANDLINE"


def with_defaults(command: Any, defaults: OptionDefaults) -> None:
    """Change a command to leave out defaults that other options outrank, and to name the source of one that fails.

    The changed command raises UsageError for a model that the file names and the user has never named.
    """
    parse_args, invoke = command.parse_args, command.invoke

    def parse(ctx: Any, args: list[str]) -> Any:
        with _naming_sources(ctx, defaults):
            return parse_args(ctx, args)

    def run(ctx: Any) -> Any:
        options = {long_name(one): one for one in command.params if one.param_type_name == "option"}
        _leave_out_excluded(ctx, options)
        _leave_out_others_methods(ctx, options)
        if "model" in ctx.params and source_of(ctx, "model") == "DEFAULT_MAP":
            _refuse_unnamed_model(ctx.params["model"], defaults.origins["model"])
        with _naming_sources(ctx, defaults):
            return invoke(ctx)

    command.parse_args, command.invoke = parse, run


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
    """Whether a talk may come to use the option, after another method was chosen in it."""
    return ctx.command.name == "chat" and option == "placement"


def _leave_out_others_methods(ctx: Any, options: dict[str, Any]) -> None:
    """Leave out the file's options of methods that are not those that were chosen, wherever that was."""
    chosen: set[str] = set()
    for name in NAMING_METHODS:
        value = ctx.params.get(name.replace("-", "_")) or []
        chosen.update([value] if isinstance(value, str) else value)
    if not ctx.params.get("method") or "all" in chosen:
        return
    _leave_out(ctx, [one for one in options.values() if (owned := owners(one)) and not owned & chosen])


def owners(option: Any) -> set[str]:
    """The methods that an option belongs to; empty for an option of the command."""
    panel = str(getattr(option, "rich_help_panel", None) or "")
    names = panel.removeprefix(METHODS_OF).split(", ") if panel.startswith(METHODS_OF) else []
    return {name.split(" ")[-1] for name in names}


def _leave_out(ctx: Any, options: list[Any]) -> None:
    for option in options:
        if source_of(ctx, option.name) == "DEFAULT_MAP":
            ctx.params[option.name] = option.default


def _refuse_unnamed_model(name: str, origin: str) -> None:
    from sparsekv.formats.models.named import may_be_loaded  # here: it imports torch

    if not may_be_loaded(name):
        raise UsageError(
            f"{origin} names the model {name}, which you have not named on this machine: add --model "
            f"{shlex.quote(name)} once, if you trust it"
        )


@contextmanager
def _naming_sources(ctx: Any, defaults: OptionDefaults) -> Iterator[None]:
    """Adds to an error that mentions an option, or its value, a note that says where the value comes from."""
    try:
        yield
    except Exception as error:
        format_message = getattr(error, "format_message", None)
        message = str(error) if format_message is None else format_message()
        for option in (one for one in ctx.command.params if one.param_type_name == "option"):
            source, name = source_of(ctx, option.name), f"--{long_name(option)}"
            origin = {"ENVIRONMENT": option.envvar, "DEFAULT_MAP": defaults.origins.get(option.name)}.get(source)
            values = _texts(ctx, option, source)
            if origin and _mentions(message, name, values):
                error.add_note(" ".join([name, *values, "comes from", str(origin)]))
        raise


def _texts(ctx: Any, option: Any, source: str) -> list[str]:
    """The values as they were written; none of a flag."""
    value = option.resolve_envvar_value(ctx) if source == "ENVIRONMENT" else ctx.lookup_default(option.name)
    values = value if isinstance(value, list) else [value]
    return [str(one) for one in values if one is not None and not isinstance(one, bool)]


def _mentions(message: str, name: str, values: list[str]) -> bool:
    telling = [name, *(value for value in values if len(value) >= _TELLING)]
    return any(re.search(rf"(?<![\w-]){re.escape(one)}(?![\w-])", message) for one in telling)
