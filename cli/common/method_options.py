"""Turn the dataclass fields of registered methods into command-line options, so that no command lists them by hand."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer

from sparsekv.cli.common.help_panels import METHODS_OF
from sparsekv.formats.errors import UsageError

T = TypeVar("T")


def with_method_options(methods: Mapping[str, type]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a command that takes `**parameters`: adds an option for each field of the methods' dataclasses.

    A field that several methods have becomes one option, which sets it for all of them.
    """

    def extend(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        options = _options(methods, taken={one.name: _kind(one.annotation) for one in own})
        command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        command.__annotations__ |= {option.name: option.annotation for option in options}
        return command

    return extend


def configure(method: type[T], parameters: Mapping[str, Any]) -> T:
    """An instance of a method with those of the given parameters that it has and that the user set (not None)."""
    known = {field.name: field for field in fields(method)}  # type: ignore[arg-type]  # methods are dataclasses
    given = {name: value for name, value in parameters.items() if name in known and value is not None}
    return method(**{name: _parse(known[name], value) for name, value in given.items()})


def configured_form(method: type[T], parameters: Mapping[str, Any]) -> tuple[str, T] | None:
    """A name and an instance of a method with the parameters that the user set for it; None if the user set none."""
    names = {field.name for field in fields(method)}  # type: ignore[arg-type]  # methods are dataclasses
    given = [f"{name}={value}" for name, value in parameters.items() if name in names and value is not None]
    return (" ".join(given), configure(method, parameters)) if given else None


def refuse_unused(chosen: Mapping[str, type], parameters: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that the user set and that none of the chosen methods has."""
    used = {field.name for method in chosen.values() for field in fields(method)}
    for name, value in parameters.items():
        if value is not None and name not in used:
            raise UsageError(f"--{name.replace('_', '-')} means nothing to {', '.join(chosen)}; leave it out")


def _options(methods: Mapping[str, type], taken: Mapping[str, str]) -> list[inspect.Parameter]:
    """Options as keyword parameters, one for each field of the methods.

    Args:
        taken: the command's own options by name, with the names of their types; fields of these names get no option.

    Raises:
        UsageError: an option has two types.
    """
    owners: dict[str, list[tuple[str, Field[Any]]]] = {}
    for name, method in methods.items():
        for field in fields(method):
            if field.name in taken:
                _check_kind(field, name, taken[field.name], "every method")
                continue
            of_field = owners.setdefault(field.name, [])
            of_field.append((name, field))
            first, known = of_field[0]
            _check_kind(field, name, _kind(known.type), first)
    return [_option(name, of) for name, of in owners.items()]


def _check_kind(field: Field[Any], name: str, kind: str, other: str) -> None:
    """Raise UsageError if a method's field has another type than the option of the same name."""
    if _kind(field.type) != kind:
        option = f"--{field.name.replace('_', '-')}"
        raise UsageError(f"{option} is {kind} for {other} and {_kind(field.type)} for {name}; rename one")


def _kind(annotation: Any) -> str:
    """The name of an annotation's type, without `Annotated` and `| None`."""
    if isinstance(annotation, str):
        return annotation
    while args := get_args(annotation):
        if not isinstance(annotation, UnionType) and get_origin(annotation) is not Annotated:
            break
        annotation = args[0]
    return getattr(annotation, "__name__", str(annotation))


def _option(name: str, owners: list[tuple[str, Field[Any]]]) -> inspect.Parameter:
    field = owners[0][1]
    kind = field.type if field.type in (int, float, str, bool) else str
    help_text = field.metadata.get("help", "")
    names, defaults = ", ".join(owner for owner, _ in owners), {_show(owned) for _, owned in owners}
    by_owner = ", ".join(f"{_show(owned)} for {owner}" for owner, owned in owners)
    of = f"[default: {by_owner if len(defaults) > 1 else defaults.pop()}]"
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            kind | None,
            typer.Option(help=f"{help_text} {of}".strip(), show_default=False, rich_help_panel=METHODS_OF + names),
        ],
    )


def _show(field: Field[Any]) -> str:
    value = field.default if field.default is not MISSING else ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _parse(field: Field[Any], value: Any) -> Any:
    """An option's value as its field's type: tuples of numbers arrive as text with commas."""
    if not isinstance(field.default, tuple) or not isinstance(value, str):
        return value
    kind = type(field.default[0])
    try:
        return tuple(kind(part) for part in value.split(","))
    except ValueError:
        option = f"--{field.name.replace('_', '-')}"
        raise UsageError(f"{option} {value}: give numbers with commas, such as {_show(field)}") from None
