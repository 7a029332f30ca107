"""Make command-line options from dataclasses: a command's own options and the methods' options. Also notes about
unusual budgets."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

import typer
from typer.models import OptionInfo

from sparsekv.cli.common.console import note
from sparsekv.cli.common.options import METHODS_OF
from sparsekv.formats.errors import UsageError

if TYPE_CHECKING:  # the module imports torch, and --help needs torch only for methods' options
    from sparsekv.runtime.selection.interface import Budget

FEW = 32


def note_budgets(budgets: "Iterable[Budget]", middle: int | None = None, *, quiet: bool) -> None:
    """Print a note for each budget that is an unusual number of tokens: below FEW, or more than the document has.

    In place of a number below FEW the user may have meant percent.

    Args:
        middle: number of the document's tokens between sinks and tail, which a method selects from; None: unknown.
    """
    for budget in budgets:
        if budget.is_share:
            continue
        if budget.value < FEW:
            tokens = "one token" if budget.value == 1 else f"{budget.value} tokens"
            note(
                f"--budget {budget.value} is {tokens} of the document; {budget.value}% is written {budget.value}% or "
                f"{budget.value / 100:g}",
                quiet=quiet,
            )
        if middle is not None and budget.value > middle:
            note(
                f"--budget {budget.value} is more than the {middle:,} tokens between sinks and tail: each step reads "
                "all of them",
                quiet=quiet,
            )


T = TypeVar("T")


def with_options(
    options: type[T],
    methods: Mapping[str, type] = MappingProxyType({}),
    *,
    preset: Collection[Field[Any]] = (),
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Return a decorator for a command that takes a dataclass of its options. typer gets the options one by one.

    A field annotated with a typer option or argument becomes that option or argument. If a field is itself a dataclass,
    its fields become options. A field of the type `typer.Context` gets the context. Any other field keeps its default.

    Each field of the methods' dataclasses becomes an option too, with or without a help text. The values of these
    options, by name, become the field `parameters`. A field that several methods have becomes one option, which sets it
    for all of them.

    Args:
        preset: fields of methods that the command sets itself, such as a seed; they become no options.
        defaults: defaults that the help shows instead of the methods' own, by field name. The command itself must apply
            them.

    Raises:
        UsageError: a method's option has the name of one of the command's own options, or has two types.
    """

    def extend(command: Callable[[T], None]) -> Callable[..., None]:
        own = list(_declared(options))
        names = {one.name for one in own}
        taken = names.union(*map(_flags, own), ("--help",))
        of_methods = _options(methods, taken, preset, defaults)

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {name: values.pop(name) for name in names}
            command(_made(options, given | {"parameters": values}))

        run.__signature__ = inspect.Signature([*own, *of_methods])  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in (*own, *of_methods)}
        return run

    return extend


def _declared(options: type) -> Iterator[inspect.Parameter]:
    """Yield the options that a dataclass declares, in the order of its fields."""
    for name, one in inspect.signature(options).parameters.items():
        if isinstance(one.annotation, type) and is_dataclass(one.annotation):
            yield from _declared(one.annotation)
        elif get_origin(one.annotation) is Annotated or one.annotation is typer.Context:
            yield inspect.Parameter(name, one.kind, default=one.default, annotation=one.annotation)


def _made(options: Any, given: Mapping[str, Any]) -> Any:
    """Make the dataclass from the given values of its fields, and of the fields of its inner dataclasses."""
    types = {one.name: one.type for one in fields(options)}
    inner = {name: _made(kind, given) for name, kind in types.items() if is_dataclass(kind)}
    return options(**inner, **{name: value for name, value in given.items() if name in types})


def _flags(own: inspect.Parameter) -> Iterator[str]:
    """Yield the flags of a command's own option, such as `--plot` or `--no-plot`; none for an argument."""
    declared = [one for one in getattr(own.annotation, "__metadata__", ()) if isinstance(one, OptionInfo)]
    for option in declared:
        # Until typer makes the option of an annotation, the option's first name is in `default`.
        names = [one for one in (option.default, *(option.param_decls or ())) if isinstance(one, str)]
        flags = [flag for name in names for flag in re.split(r"\s*/\s*", name)]
        yield from flags or (flag(own.name), flag(f"no_{own.name}"))


def flag(name: str) -> str:
    """Return the command-line option of a field."""
    return f"--{name.replace('_', '-')}"


def _options(
    methods: Mapping[str, type],
    taken: Collection[str],
    preset: Collection[Field[Any]],
    defaults: Mapping[str, object],
) -> list[inspect.Parameter]:
    """Return the methods' options as keyword parameters, one for each field name.

    Args:
        taken: names and flags of the command's own options.
        preset: fields that get no option.

    Raises:
        UsageError: an option has a name that is taken, or two types.
    """
    owners: dict[str, list[tuple[str, Field[Any]]]] = {}
    for name, method in methods.items():
        for field in fields(method):
            if any(field is one for one in preset):
                continue
            if field.name in taken or flag(field.name) in taken:
                raise UsageError(
                    f"{flag(field.name)} of {name} is also an option of the command itself; rename the method's field"
                )
            of_field = owners.setdefault(field.name, [])
            of_field.append((name, field))
            first, known = of_field[0]
            _check_kind(field, name, _kind(known.type), first)
    return [_option(name, of, str(defaults.get(name, ""))) for name, of in owners.items()]


def _check_kind(field: Field[Any], name: str, kind: str, other: str) -> None:
    """Raise UsageError if a method's field has another type than the field of the same name of another method."""
    if _kind(field.type) != kind:
        raise UsageError(f"{flag(field.name)} is {kind} for {other} and {_kind(field.type)} for {name}; rename one")


def _kind(annotation: Any) -> str:
    """Return the name of an annotation's type, without `Annotated` and `| None`."""
    if isinstance(annotation, str):
        return annotation
    while args := get_args(annotation):
        if not isinstance(annotation, UnionType) and get_origin(annotation) is not Annotated:
            break
        annotation = args[0]
    return getattr(annotation, "__name__", str(annotation))


def _option(name: str, owners: list[tuple[str, Field[Any]]], default: str) -> inspect.Parameter:
    """Return an option of the methods `owners`. The help shows `default`; if this is empty, the methods' defaults."""
    from sparsekv.runtime.selection.registry import show_default  # the module imports torch

    field = owners[0][1]
    kind = field.type if field.type in (int, float, str, bool) else str
    help_text = field.metadata.get("help", "")
    names, defaults = ", ".join(owner for owner, _ in owners), {show_default(owned) for _, owned in owners}
    by_owner = ", ".join(f"{show_default(owned)} for {owner}" for owner, owned in owners)
    of = f"[default: {default or (by_owner if len(defaults) > 1 else defaults.pop())}]"
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            kind | None,
            typer.Option(help=f"{help_text} {of}".strip(), show_default=False, rich_help_panel=METHODS_OF + names),
        ],
    )
