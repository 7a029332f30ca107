"""Build the indices of several documents, in this process or on a Ray cluster. A document that fails does not stop
the others."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sparsekv.cli.building.recipe import BuildRecipe, Target
from sparsekv.cli.common.console import note, progress, say, tell
from sparsekv.cli.common.failures import causes, describe
from sparsekv.cli.common.ray_cluster import RayCluster, RayWorker, whole_model
from sparsekv.cli.common.streams import printable
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.plan import Progress

Done = Callable[[Target, str], None]
"""Called for each finished document, with its error as one line of text, or an empty string if it is indexed."""


Work = Callable[[Sequence[Target], Progress, Done], None]
"""Indexes the targets, reports its progress, and calls `Done` for each target."""


def index_several(targets: Sequence[Target], work: Work, *, quiet: bool) -> None:
    """Index several documents, and print the path of each index when it is complete.

    Missing files are reported first, and documents that could not be indexed at the end.

    Raises:
        SparsekvError: some documents could not be indexed; or the errors of `work`.
    """
    failures: dict[str, str] = {}
    results, count = sys.stdout, 0  # the original stdout, because the Ray cluster redirects sys.stdout

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
            f"{wrong} of {len(targets)} documents {'was' if wrong == 1 else 'were'} not indexed, for the reasons "
            "above; run the same command again to retry only these"
        )


def index_here(recipe: BuildRecipe, targets: Sequence[Target], show: Progress, done: Done) -> None:
    """Index one document after another, with the model loaded once.

    Raises:
        SparsekvError: the model cannot be loaded.
    """
    loaded = recipe.load()
    for number, target in enumerate(targets, 1):
        note(f"{target.document} ({number} of {len(targets)})", quiet=recipe.quiet)
        done(target, failure(lambda: recipe.index(target, lambda: loaded, show)))  # noqa: B023


def failure(build: Callable[[], None]) -> str:
    """Run a build and return its error as one line of text, or an empty string. Ctrl-C is raised."""
    try:
        build()
    except Exception as error:
        if any(isinstance(one, KeyboardInterrupt) for one in causes(error)):
            raise  # libraries turn Ctrl-C into errors of their own
        return describe(error, "build-index")
    return ""


class IndexWorker(RayWorker[BuildRecipe, Target]):
    """A Ray worker that holds a model, and builds or resumes the index of a document."""

    command = "build-index"
    loaded: LoadedModel

    def prepare(self) -> None:
        self.loaded = self.recipe.load()

    def work(self, job: Target) -> None:
        self.recipe.index(job, lambda: self.loaded, lambda stage, done, of: None)


def index_by_ray(
    recipe: BuildRecipe, address: str, workers: int | None, targets: Sequence[Target], _: Progress, done: Done
) -> None:
    """Index all documents on a Ray cluster, the largest file first.

    Raises:
        UsageError: a document is standard input, which workers do not have; or the errors of `RayCluster.run`.
    """
    if any(one.document == "-" for one in targets):
        raise UsageError("--ray: workers cannot read this command's standard input; name a file")
    named = {_whole(one): one for one in targets}
    elsewhere = replace(recipe, quiet=True, model=whole_model(recipe.model))
    cluster = RayCluster(IndexWorker, elsewhere, address, workers)
    for whole, wrong in cluster.run(sorted(named, key=_size)):
        done(named[whole], wrong.replace(whole.document, named[whole].document))


def _whole(target: Target) -> Target:
    """Return a target with absolute paths, which are valid in every process that shares the file system."""
    return Target(os.path.abspath(target.document), target.folder.absolute())


def _size(target: Target) -> int:
    try:
        return Path(target.document).stat().st_size
    except OSError:
        return 0
