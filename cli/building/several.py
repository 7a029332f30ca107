"""Index several documents, whatever becomes of some of them."""

import os
import sys
from collections.abc import Callable, Sequence

from sparsekv.cli.building.recipe import Recipe
from sparsekv.cli.building.targets import Target
from sparsekv.cli.common.console import note, progress, say, tell
from sparsekv.cli.common.failures import causes, describe
from sparsekv.cli.common.printable import printable
from sparsekv.formats.errors import SparsekvError
from sparsekv.indexing.plan import Progress

Done = Callable[[Target, str], None]
"""Told of each document that is done, and what went wrong with it in one line, empty for nothing."""


def index_several(targets: Sequence[Target], work: Callable[[Progress, Done], None], *, quiet: bool) -> None:
    """Print each index's path once it is whole, and at the end what went wrong with the other documents.

    Args:
        work: indexes the targets, and tells of its progress.

    Raises:
        SparsekvError: some documents could not be indexed; or what `work` raises.
    """
    failures: dict[str, str] = {}
    results, count = sys.stdout, 0  # by name: a cluster's own messages are kept from stdout

    def done(target: Target, wrong: str) -> None:
        nonlocal count
        count += 1
        show("documents", count, len(targets))
        if wrong:
            failures[target.document] = wrong
        else:
            say(str(target.folder), to=results)

    for target in targets:
        if target.document != "-" and not os.path.exists(target.document):
            note(f"{target.document}: no such file; the others are indexed", quiet=quiet)
    with progress(quiet=quiet) as show:
        show("documents", 0, len(targets))
        work(show, done)
    for document, why in failures.items():
        tell(printable(why if why.startswith(document) else f"{document}: {why}"), soft_wrap=True)
    if failures:
        raise SparsekvError(
            f"{len(failures)} of {len(targets)} documents are not indexed, for the reasons above; the same command "
            "tries these again, and leaves the others as they are"
        )


def index_here(recipe: Recipe, targets: Sequence[Target], show: Progress, done: Done) -> None:
    """Index one document after another, with one model.

    Raises:
        SparsekvError: the model cannot be loaded.
    """
    loaded = recipe.load()
    for number, target in enumerate(targets, 1):
        note(f"{target.document} ({number} of {len(targets)})", quiet=recipe.quiet)
        wrong = ""
        try:
            recipe.index(target, lambda: loaded, show)
        except Exception as error:
            if any(isinstance(one, KeyboardInterrupt) for one in causes(error)):
                raise  # libraries turn Ctrl-C into errors of their own
            wrong = describe(error, "build-index")
        done(target, wrong)
