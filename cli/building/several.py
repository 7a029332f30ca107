"""Index several documents, whatever becomes of some of them."""

import os
import sys
from collections.abc import Callable, Sequence

from sparsekv.cli.building.recipe import BuildRecipe
from sparsekv.cli.building.targets import Target
from sparsekv.cli.common.console import note, progress, say, tell
from sparsekv.cli.common.failures import causes, describe
from sparsekv.cli.common.printable import printable
from sparsekv.formats.errors import SparsekvError
from sparsekv.indexing.plan import Progress

Done = Callable[[Target, str], None]
"""Told of each document that is done, and what went wrong with it in one line, empty for nothing."""


Work = Callable[[Sequence[Target], Progress, Done], None]
"""Indexes the targets, and tells of its progress."""


def index_several(targets: Sequence[Target], work: Work, *, quiet: bool) -> None:
    """Print each index's path once it is whole, and what went wrong with the other documents: first of those that are
    not there, and at the end of those that could not be indexed.

    Raises:
        SparsekvError: some documents could not be indexed; or what `work` raises.
    """
    failures: dict[str, str] = {}
    results, count = sys.stdout, 0  # by name: a cluster's own messages are kept from stdout

    def done(target: Target, wrong: str) -> None:
        nonlocal count
        count += 1
        show("documents", count, len(there))
        if wrong:
            failures[target.document] = wrong
        else:
            say(str(target.folder), to=results)

    there = [target for target in targets if target.document == "-" or os.path.exists(target.document)]
    for target in targets:
        if target not in there:
            others = "; the others are indexed" if there else ""
            tell(printable(f"no such file: {target.document}{others}"), soft_wrap=True)
    with progress(quiet=quiet) as show:
        if there:
            show("documents", 0, len(there))
            work(there, show, done)
    for document, why in failures.items():
        named = why.startswith(document) or why.endswith(document)
        tell(printable(why if named else f"{document}: {why}"), soft_wrap=True)
    if wrong := len(targets) - len(there) + len(failures):
        raise SparsekvError(
            f"{wrong} of {len(targets)} documents are not indexed, for the reasons above; the same command "
            "tries these again, and leaves the others as they are"
        )


def index_here(recipe: BuildRecipe, targets: Sequence[Target], show: Progress, done: Done) -> None:
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
