"""Index documents by the workers of a Ray cluster, each one document at a time."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sparsekv.cli.building.recipe import BuildRecipe
from sparsekv.cli.building.several import Done
from sparsekv.cli.building.targets import Target
from sparsekv.cli.common.ray_cluster import RayCluster
from sparsekv.cli.common.ray_worker import RayWorker, whole_model
from sparsekv.formats.errors import UsageError
from sparsekv.formats.models.load import LoadedModel


class IndexWorker(RayWorker[BuildRecipe, Target]):
    """Holds a model, and builds or resumes the index of a document."""

    command = "build-index"
    loaded: LoadedModel

    def prepare(self) -> None:
        self.loaded = self.recipe.load()

    def work(self, job: Target) -> None:
        self.recipe.index(job, lambda: self.loaded, lambda stage, done, of: None)


def index_by_ray(recipe: BuildRecipe, address: str, workers: int | None, targets: Sequence[Target], done: Done) -> None:
    """Index all documents by a cluster, the longest first.

    Raises:
        UsageError: a document is standard input, which workers do not have; or what `RayCluster.run` raises.
    """
    if any(one.document == "-" for one in targets):
        raise UsageError("--ray: workers have no standard input; name a file")
    named = {_whole(one): one for one in targets}
    elsewhere = replace(recipe, quiet=True, model=whole_model(recipe.model))
    cluster = RayCluster(IndexWorker, elsewhere, address, workers)
    for whole, wrong in cluster.run(sorted(named, key=_size)):
        done(named[whole], wrong.replace(whole.document, named[whole].document))


def _whole(target: Target) -> Target:
    """A target by paths that mean the same in every process that shares the folder."""
    return Target(os.path.abspath(target.document), target.folder.absolute())


def _size(target: Target) -> int:
    try:
        return Path(target.document).stat().st_size
    except OSError:
        return 0
