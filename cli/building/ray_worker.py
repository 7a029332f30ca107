"""One worker of a Ray cluster: it holds a model, and indexes the documents that it is given."""

import os
from dataclasses import replace

from sparsekv.cli.building.recipe import Recipe
from sparsekv.cli.building.targets import Target
from sparsekv.cli.common.failures import describe
from sparsekv.cli.common.quiet_libraries import quiet_libraries
from sparsekv.formats.models.load import LoadedModel


class Worker:
    """What went wrong comes back as one line, because not every error can travel between processes.

    Args:
        threads: of torch; None for its own number.
    """

    def __init__(self, recipe: Recipe, threads: int | None):
        self.recipe = recipe
        self._loaded: LoadedModel | None = None
        if threads is not None:
            import torch

            torch.set_num_threads(threads)

    def load(self) -> str:
        """Load the model; returns what went wrong, empty for nothing."""
        try:
            with quiet_libraries(debug=False):
                self._loaded = self.recipe.load()
        except Exception as error:
            return describe(error, "build-index")
        return ""

    def index(self, target: Target) -> str:
        """Build a document's index, or resume it; returns what went wrong, empty for nothing."""
        try:
            with quiet_libraries(debug=False):
                self.recipe.index(target, self._model, lambda stage, done, of: None)
        except Exception as error:
            return describe(error, "build-index")
        return ""

    def _model(self) -> LoadedModel:
        assert self._loaded is not None
        return self._loaded


def work_quietly(recipe: Recipe) -> Recipe:
    """The recipe for another process: it prints nothing, and a model's folder is found from any folder."""
    model = recipe.model
    whole = os.path.abspath(os.path.expanduser(model)) if model and os.path.isdir(os.path.expanduser(model)) else model
    return replace(recipe, quiet=True, model=whole)
