"""`build-index` by several ranks: each runs its share of the model and makes its share of the indices."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sparsekv.cli.building.recipe import BuildRecipe
from sparsekv.cli.building.targets import Target
from sparsekv.cli.common.loading import load
from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.plan import Progress, choose_chunk_size

if TYPE_CHECKING:  # torch.distributed is for ranks alone
    from sparsekv.formats.ranks.ranks import Ranks


def index_by_ranks(ranks: "Ranks", recipe: BuildRecipe, target: Target, show: Progress) -> None:
    """Build a document's index, or resume or update it; all ranks call this together.

    Raises:
        SparsekvError: the ranks cannot share the model; or what `BuildRecipe.index` raises.
    """
    loads = partial(load, recipe.model, str(ranks.device), recipe.dtype, recipe.config.rope_scaling, quiet=recipe.quiet)
    if not ranks.first:
        from sparsekv.indexing.ranks.follow import follow

        return follow(ranks, loads(ranks=ranks))

    from sparsekv.formats.models.shards import splits_heads
    from sparsekv.indexing.ranks.lead import Leader

    def leader(loaded: LoadedModel) -> Leader:
        return Leader(ranks, split=splits_heads(loaded.model))

    config = recipe.config
    chunk_size = choose_chunk_size(config.chunk_size, ranks.device, config.prefill, ranks.size)
    chunked = replace(recipe, config=replace(config, chunk_size=chunk_size))
    chunked.index(target, lambda: loads(ranks=ranks), show, leader)
