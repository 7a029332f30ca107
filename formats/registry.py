"""Registries that map names to methods, indexers, prefills and tasks, including those of installed packages."""

import importlib
import pkgutil
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from sparsekv.formats.errors import UsageError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to classes or objects of one kind. Its first call imports the modules that register them.

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
        """Return a decorator that registers a class under a name; it raises UsageError if the name is taken."""

        def add(thing: T) -> T:
            self.add(name, thing)
            return thing

        return add

    def __call__(self) -> dict[str, T]:
        """Return all entries by name, sorted.

        Raises:
            UsageError: an entry of an installed package cannot be loaded, has the wrong base class, or has a name that
                is taken.
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
        """Register an entry under a name; raises UsageError if another entry has the name."""
        if name in self.known and self.known[name] is not thing:
            raise UsageError(
                f"two {self.kind}s are called '{name}', {_where(self.known[name])} and {_where(thing)}; rename or "
                "remove one of them"
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
        thing: T = loaded  # type: ignore[assignment]  # issubclass has checked it
        return thing


def _where(thing: object) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__name__)}"
