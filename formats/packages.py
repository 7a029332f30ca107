"""Name the package of a method's or an indexer's class, and turn errors of its code into one line that names both."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparsekv.formats.errors import SparsekvError

OURS = __package__.partition(".")[0]


def package_of(kind: type) -> str:
    """Return the name of the top-level package that defines a class."""
    return kind.__module__.partition(".")[0]


def wrong_class(kind: type, what: str) -> SparsekvError:
    """Return an error whose line names a method's or an indexer's class, the class's package and the fault `what`."""
    return SparsekvError(f"{_named(kind)}: {what}; correct the method")


@contextmanager
def told_of(kind: type) -> Iterator[None]:
    """Within the context, convert errors to a SparsekvError that names `kind`, a class of another package.

    A SparsekvError is raised unchanged, and so is every error if `kind` is a class of this package. SystemExit is
    converted, too. KeyboardInterrupt is not, because it cannot be told from Ctrl-C.
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
