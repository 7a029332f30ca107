"""Index several documents with one model, whatever becomes of some of them."""

from collections.abc import Sequence

from sparsekv.cli.building.recipe import Recipe
from sparsekv.cli.building.targets import Target
from sparsekv.cli.common.console import note, progress, say, tell
from sparsekv.cli.common.failures import causes, describe
from sparsekv.cli.common.printable import printable
from sparsekv.formats.errors import SparsekvError

Failures = dict[str, str]
"""What went wrong, in one line, by document."""


def index_several(recipe: Recipe, targets: Sequence[Target]) -> None:
    """Index each document, and print its index's path once that is whole.

    Raises:
        SparsekvError: the model cannot be loaded; or, after all others, some documents could not be indexed.
    """
    loaded, failures = recipe.load(), Failures()
    with progress(quiet=recipe.quiet) as show:
        for number, target in enumerate(targets):
            show("documents", number, len(targets))
            note(f"{target.document} ({number + 1} of {len(targets)})", quiet=recipe.quiet)
            try:
                recipe.index(target, lambda: loaded, show)
            except Exception as error:
                if any(isinstance(one, KeyboardInterrupt) for one in causes(error)):
                    raise  # libraries turn Ctrl-C into errors of their own
                failures[target.document] = describe(error, "build-index")
            else:
                say(str(target.folder))
        show("documents", len(targets), len(targets))
    tell_failures(failures, len(targets))


def tell_failures(failures: Failures, of: int) -> None:
    """Print a line to stderr for each document that was not indexed; raises SparsekvError if there is one."""
    for document, why in failures.items():
        tell(printable(why if why.startswith(document) else f"{document}: {why}"), soft_wrap=True)
    if failures:
        raise SparsekvError(
            f"{len(failures)} of {of} documents are not indexed, for the reasons above; the same command tries these "
            "again, and leaves the others as they are"
        )
