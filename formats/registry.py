"""What a command line knows by name: methods, indexers, ways to prefill and tasks, ours and installed ones."""

import importlib
import pkgutil
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from sparsekv.formats.errors import UsageError

T = TypeVar("T")


class Registry(Generic[T]):
    """Things of one kind by name, found when they are first asked for.

    Args:
        kind: what messages call one of them.
        package: whose modules register theirs when they are imported.
        group: of entry points, by which installed packages add classes; None: they cannot.
        base: what such a class has to be.
    """

    def __init__(self, kind: str, package: str, group: str | None = None, base: type | None = None):
        self.kind, self.package, self.group, self.base = kind, package, group, base
        self.known: dict[str, T] = {}
        self.found = False

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: makes a class known to every command under this name; UsageError where another one has it."""

        def add(thing: T) -> T:
            self.add(name, thing)
            return thing

        return add

    def __call__(self) -> dict[str, T]:
        """All of them by name.

        Raises:
            UsageError: an installed package's cannot be loaded, is none of this kind, or has a name that is taken.
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
        """Make a thing known under a name; UsageError where another one has it."""
        if name in self.known and self.known[name] is not thing:
            raise UsageError(f"two {self.kind}s are called '{name}', {_where(self.known[name])} and {_where(thing)}")
        self.known[name] = thing

    def _load(self, entry: EntryPoint) -> T:
        source = f"{self.kind} '{entry.name}' of the installed package {entry.dist.name if entry.dist else entry.value}"
        try:
            loaded: Any = entry.load()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise UsageError(f"{source} cannot be loaded ({why}); mend or remove it") from error
        if not (isinstance(loaded, type) and self.base is not None and issubclass(loaded, self.base)):
            raise UsageError(f"{source} is no {getattr(self.base, '__name__', self.kind)}; mend or remove it")
        thing: T = loaded  # type: ignore[assignment]  # it is a class of the kind that this registry has
        return thing


def _where(thing: object) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__name__)}"
