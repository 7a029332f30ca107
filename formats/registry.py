"""Registries that map names to methods, indexers, prefills and tasks, including those of installed packages.

An error of a package's class becomes one line that names the class and its package.
"""

import importlib
import pkgutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar, get_origin

from sparsekv.formats.errors import SparsekvError, UsageError

OURS = __package__.partition(".")[0]


def package_of(kind: type) -> str:
    """Return the name of the top-level package that defines a class."""
    return kind.__module__.partition(".")[0]


def wrong_class(kind: type, what: str) -> SparsekvError:
    """Return an error that names the class of a method or an indexer, the class's package, and the fault `what`."""
    return SparsekvError(f"{_named(kind)}: {what}; correct the method")


@contextmanager
def told_of(kind: type) -> Iterator[None]:
    """Within the context, convert errors to a SparsekvError that names `kind`, a class of another package.

    A SparsekvError is raised unchanged, and so is every error if `kind` is a class of this package. SystemExit is
    converted, too. KeyboardInterrupt is not, because it cannot be distinguished from Ctrl-C.
    """
    try:
        yield
    except SparsekvError:
        raise
    except (Exception, SystemExit) as error:
        if package_of(kind) == OURS:
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise SparsekvError(f"{_named(kind)} failed: {text} ({_place(error, kind)}); correct the method") from error


def _place(error: BaseException, kind: type) -> str:
    """Return file and line of the last call in the class's package, or of the last call if none is in it."""
    calls = list(traceback.walk_tb(error.__traceback__))
    own = [call for call in calls if call[0].f_globals.get("__name__", "").partition(".")[0] == package_of(kind)]
    frame, line = (own or calls)[-1]
    return f"{Path(frame.f_code.co_filename).name}, line {line}"


def _named(kind: type) -> str:
    return f"the method {kind.__name__} of the package {package_of(kind)}"


T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to classes or objects of one kind. Its first call imports the modules that register entries.

    Args:
        kind: the word for an entry in messages.
        package: the package whose modules register entries when they are imported.
        group: entry point group through which installed packages add classes; None if they cannot.
        base: required base class of the classes of installed packages.
    """

    def __init__(self, kind: str, package: str, group: str | None = None, base: type | None = None):
        self.kind, self.package, self.group, self.base = kind, package, group, base
        self.known: dict[str, T] = {}
        self.found = False

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers a class under a name by `add`."""

        def add(thing: T) -> T:
            self.add(name, thing)
            return thing

        return add

    def __call__(self) -> dict[str, T]:
        """Return all entries by name, sorted.

        Raises:
            UsageError: an entry of an installed package cannot be loaded or has the wrong base class, or `add` or
                `check_options` refuses it.
        """
        if not self.found:
            package = importlib.import_module(self.package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self.package}.{module.name}")
            for entry in () if self.group is None else entry_points(group=self.group):
                self.add(entry.name, self._load(entry))
            self.found = True
        return dict(sorted(self.known.items()))

    def add(self, name: str, thing: T) -> None:
        """Register an entry under a name.

        Raises:
            UsageError: another entry has the name, `check_options` refuses a dataclass, or a class lacks a function
                that every entry needs.
        """
        if name in self.known and self.known[name] is not thing:
            raise UsageError(
                f"two {self.kind}s are called '{name}', {_where(self.known[name])} and {_where(thing)}; rename or "
                "remove one of them"
            )
        if isinstance(thing, type) and is_dataclass(thing):
            check_options(f"{self.kind} '{name}'", thing)
        if lacking := sorted(getattr(thing, "__abstractmethods__", ())):
            raise UsageError(
                f"{self.kind} '{name}': {_where(thing)} does not define {', '.join(lacking)}; add it to the class"
            )
        self.known[name] = thing

    def _load(self, entry: EntryPoint) -> T:
        source = f"{self.kind} '{entry.name}' of the installed package {entry.dist.name if entry.dist else entry.value}"
        try:
            loaded: Any = entry.load()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise UsageError(f"{source} cannot be loaded ({why}); repair or remove it") from error
        if not (isinstance(loaded, type) and self.base is not None and issubclass(loaded, self.base)):
            raise UsageError(f"{source} is no {getattr(self.base, '__name__', self.kind)}; repair or remove it")
        check_options(source, loaded)
        thing: T = loaded  # type: ignore[assignment]  # issubclass has checked it
        return thing


_KINDS: tuple[Any, ...] = (int, float, str, bool)


def check_options(source: str, kind: type) -> None:
    """Raise UsageError if a class has annotated fields of its own and is no dataclass, or a field cannot be an option.

    Also raise it for a public attribute without an annotation whose value is a number, a string, a bool or a tuple. An
    attribute that overrides one of a base class is allowed.

    Args:
        source: the beginning of the message: the entry's kind and name, and its package if that is an installed one.
    """
    own, name = vars(kind).get("__annotations__", {}), f"{kind.__module__}.{kind.__qualname__}"
    if "__dataclass_fields__" not in vars(kind) and not all(map(_is_class_variable, own.values())):
        raise UsageError(f"{source}: {name} is not a dataclass; put @dataclass(frozen=True) directly above it")
    for field in fields(kind):
        if wrong := _wrong_option(field):
            raise UsageError(f"{source}: field {field.name} of {name} {wrong}")
    for attribute, value in vars(kind).items():
        inherited = any(hasattr(base, attribute) for base in kind.__bases__)
        if isinstance(value, (*_KINDS, tuple)) and not (attribute.startswith("_") or attribute in own or inherited):
            raise UsageError(
                f"{source}: field {attribute} of {name} has no annotation; annotate it with its type, or with ClassVar "
                "if it is not an option"
            )


def _is_class_variable(annotation: Any) -> bool:
    return "ClassVar" in str(annotation)


def _wrong_option(field: Field[Any]) -> str:
    """Return why a field cannot be an option, with a remedy; an empty string if it can."""
    default, kind = field.default, field.type
    is_tuple = kind is tuple or get_origin(kind) is tuple
    if isinstance(kind, str):
        return f"has the annotation '{kind}' as text; leave out `from __future__ import annotations`"
    if not is_tuple and kind not in _KINDS:
        told = getattr(kind, "__name__", kind) if isinstance(kind, type) else kind
        return f"is of the type {told}; options are of the types int, float, str, bool or tuple"
    if default is MISSING:
        return "has no default; give it one"
    if is_tuple:
        numbers = isinstance(default, tuple) and default and all(type(one) in (int, float) for one in default)
        return "" if numbers else f"has the default {default!r}; give it a tuple of numbers"
    allowed = (int, float) if kind is float else (kind,)
    return "" if type(default) in allowed else f"is of the type {kind.__name__}, and its default is {default!r}"


def _where(thing: object) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__name__)}"
