"""Choice of methods by name, and their configuration with the parameters that a user set."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from sparsekv.formats.errors import AUTO_ELSEWHERE, UsageError, add_methods_hint, any_of, check_type, suggestion
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import AUTO
from sparsekv.runtime.selection.interface import DENSE, MethodSpec, methods

T = TypeVar("T")


def configure(method: type[T], parameters: Mapping[str, Any]) -> T:
    """Create a method from the `parameters` that are fields of the method and that the user set (not None).

    Raises UsageError for a value of another type, and the errors of the method's class.
    """
    known = {field.name: field for field in fields(method)}  # type: ignore[arg-type]  # methods are dataclasses
    given = {name: value for name, value in parameters.items() if name in known and value is not None}
    parsed = {name: _parse(known[name], value) for name, value in given.items()}
    for name, value in parsed.items():
        check_type(f"--{name.replace('_', '-')}", value, known[name].type)
    return method(**parsed)


def configured_form(method: type[T], parameters: Mapping[str, Any]) -> tuple[str, T] | None:
    """Return a name for the parameters that the user set, such as `rerank=4`, and the method with these parameters.

    Returns None if the user set none of the method's parameters. Raises the errors of `configure`.
    """
    label = parameters_label(parameters, method)
    return (label, configure(method, parameters)) if label else None


def parameters_label(parameters: Mapping[str, Any], *owners: type) -> str:
    """Return names and values of the parameters that the user set (not None), such as `rerank=4 scan=0.5`.

    Parameters that are fields of none of the classes `owners` are left out.
    """
    names = {field.name for owner in owners for field in fields(owner)}
    return " ".join(f"{name}={value}" for name, value in parameters.items() if name in names and value is not None)


def refuse_unused(
    chosen: Mapping[str, type],
    parameters: Mapping[str, Any],
    among: Mapping[str, type] | None = None,
    decoding: Collection[str] = (),
    *,
    asking: Collection[str] = (),
    answers: bool = True,
    lacking: Mapping[str, str] | None = None,
) -> None:
    """Raise UsageError for an option that the user set and that none of the chosen methods reads.

    Args:
        chosen: the chosen methods, by name.
        parameters: values of all methods' options, by field name; None: the user did not set the option.
        among: all available methods, by name. The error message names those that have the option.
        decoding: names of chosen methods that select only for decode steps, not for a question's tokens.
        asking: names of chosen methods that select only for a question's tokens.
        answers: whether tokens are generated; False for a report on stored queries.
        lacking: names of available methods for which the index has no tensors, with the command that adds each.
    """
    for name, value in parameters.items():
        if value is None:
            continue
        having = {of: method for of, method in chosen.items() if name in {field.name for field in fields(method)}}
        why = {
            of: unread(method, name, parameters, decodes=of in decoding, asks=of in asking, answers=answers)
            for of, method in having.items()
        }
        option = f"--{name.replace('_', '-')}"
        if not having:
            owners = [of for of, method in (among or {}).items() if name in {field.name for field in fields(method)}]
            told = f"{option} has no effect on {any_of(chosen)}; leave it out"
            raise UsageError(f"{told}{_method_with(owners, lacking or {})}")
        if all(why.values()):
            raise UsageError(f"{option} has no effect on {any_of(why)} {next(iter(why.values()))}; leave it out")


def _method_with(owners: Sequence[str], lacking: Mapping[str, str]) -> str:
    """Return the end of a message about an option: a method that has it; empty if there is none.

    Args:
        owners: methods that have the option.
        lacking: methods for which the index has no tensors, with the command that adds each.
    """
    if usable := [name for name in owners if name not in lacking]:
        return f", or choose a method that has it: {', '.join(usable)}"
    if owners:
        return f", or add {owners[0]}, which has it and which the index lacks: {lacking[owners[0]]}"
    return ""


def unread(
    method: type,
    name: str,
    parameters: Mapping[str, Any],
    *,
    decodes: bool,
    asks: bool = False,
    answers: bool = True,
) -> str:
    """Return the reason why a method does not read its field `name`, as words for a message.

    The reason is empty if the method reads the field, or if the field has its default. The field's metadata has the
    conditions. `needs`: values of the method's other fields, by name; a tuple has several values, any of which will do.
    `unless`: values of other fields with which the field is not read. `joint`: the field is read only by a selection
    that the tokens of a question or of a chunk share. `steps`: the field is read only in decode steps. `appends`: the
    field is read only when tokens are generated.

    Args:
        parameters: values of options by field name; None: the user did not set the option.
        decodes: whether the method selects only for decode steps.
        asks: whether the method selects only for a question's tokens.
        answers: whether tokens are generated.
    """
    known = {field.name: field for field in fields(method)}
    if parameters.get(name) in (None, known[name].default):
        return ""
    used = {
        other: field.default if parameters.get(other) is None else parameters[other] for other, field in known.items()
    }
    for other, value in known[name].metadata.get("needs", {}).items():
        values = value if isinstance(value, tuple) else (value,)
        if other in known and used[other] not in values:
            return f"without --{other.replace('_', '-')}" + (
                "" if value is True else f" {' or '.join(map(str, values))}"
            )
    for other, value in known[name].metadata.get("unless", {}).items():
        if used.get(other) == value:
            return f"with --{other.replace('_', '-')} {value}"
    if asks and {"steps", "appends"} & known[name].metadata.keys():
        return "in a question's prefill, which has no decode steps"
    if known[name].metadata.get("appends") and not answers:
        return "where no tokens are generated"
    return "in decode steps, each of which has one query" if decodes and known[name].metadata.get("joint") else ""


def form_options(form: MethodSpec) -> list[str]:
    """Return a method's options as the command line takes them: `--residual`, and parameters that are not defaults."""
    return [*(["--residual"] if form.residual else []), *changed_options(form.method)]


def changed_options(*methods: object) -> list[str]:
    """Return the parameters of methods or indexers that differ from the defaults, as command-line options.

    An option that several methods share is returned once.
    """
    options: dict[str, list[str]] = {}
    for method in methods:
        usual = type(method)()
        for one in fields(method):  # type: ignore[arg-type]  # methods are dataclasses
            value, name = getattr(method, one.name), one.name.replace("_", "-")
            if value == getattr(usual, one.name):
                continue
            if isinstance(value, bool):
                options[name] = [f"--{name}" if value else f"--no-{name}"]
            else:
                options[name] = [f"--{name}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return [part for parts in options.values() for part in parts]


def _parse(field: Field[Any], value: Any) -> Any:
    """Convert the text of an option whose field is a tuple of numbers to the tuple; return other values unchanged.

    Raises:
        UsageError: the text is not a list of numbers that are separated by commas.
    """
    if not isinstance(field.default, tuple) or not isinstance(value, str):
        return value
    kind = type(field.default[0])
    try:
        return tuple(kind(part) for part in value.split(","))
    except ValueError:
        option = f"--{field.name.replace('_', '-')}"
        raise UsageError(f"{option} {value}: give numbers separated by commas, such as {show_default(field)}") from None


def show_default(field: Field[Any]) -> str:
    """Format a field's default as the command line accepts it; without a default the text is empty."""
    value = field.default if field.default is not MISSING else ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def methods_of(artifact: Artifact, names: Sequence[str] = (), beside: Sequence[str] = ()) -> list[str]:
    """Choose methods of an index, as `choose_methods` does; the error for a missing method shows how to add it."""

    def how(name: str) -> str:
        return f"add it with {add_methods_hint(artifact.folder, [name])}"

    return choose_methods(names, list(artifact.manifest.methods), how, beside)


def method_of(artifact: Artifact, name: str, beside: Sequence[str] = ()) -> str:
    """Return the name of a single method after the checks of `methods_of`; raise UsageError for `all`, too."""
    if name == "all":
        raise UsageError(f"name one method, not all; there are: {', '.join([*methods_of(artifact), *beside])}")
    return methods_of(artifact, [name], beside)[0]


def choose_methods(
    names: Sequence[str],
    indexed: Sequence[str],
    how: Callable[[str], str] = "build {} too".format,
    beside: Sequence[str] = (),
) -> list[str]:
    """Return the names of the methods to run on an index built with the methods `indexed`.

    A method is usable if it needs no index or is in `indexed`. Without names, or with `all` among the names, all usable
    methods are returned.

    Args:
        how: returns, for a method's name, the instruction that adds the method to the index.
        beside: names that the caller accepts and handles itself, such as `dense`, and that are not among `names`. Error
            messages list them with the methods.

    Raises:
        UsageError: a name is not a method's name, the method is not usable, or a name is `dense` or `auto`.
    """
    known = methods()
    usable = [name for name, method in known.items() if not method.needs_index or name in indexed]
    for name in names:
        if name == DENSE:
            raise UsageError(f"{name} attention is the baseline with which all methods are compared; leave it out")
        if name == AUTO:
            raise UsageError(f"{AUTO_ELSEWHERE}; name one of: {', '.join([*usable, *beside])}")
        if name not in known and name != "all":
            there = [*usable, *beside]
            several = "; name each by a --method of its own" if "," in name else ""
            meant = "" if several else suggestion(name, [*known, *beside])
            lacking = [one for one in known if one not in usable]
            more = f"; not in this index: {', '.join(lacking)}" if lacking and not several else ""
            raise UsageError(f"no method '{name}'{meant}; there are: {', '.join(there)}{several or more}")
        if name != "all" and name not in usable:
            raise UsageError(
                f"the index was not built with '{name}'; {how(name)}, or choose one of: {', '.join([*usable, *beside])}"
            )
    return usable if not names or "all" in names else list(dict.fromkeys(names))
