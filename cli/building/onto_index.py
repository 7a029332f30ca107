"""`build-index` of an index in the place of a document: more methods for it, from its own keys, values and tokens."""

import shlex
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from sparsekv.cli.building.recipe import BuildRecipe, tell_built
from sparsekv.cli.common.console import note
from sparsekv.cli.common.loading import load_for
from sparsekv.formats.errors import UsageError
from sparsekv.formats.reader import Artifact
from sparsekv.formats.schema import MANIFEST
from sparsekv.indexing.append import refuse_other_dtype
from sparsekv.indexing.build import build_index
from sparsekv.indexing.more_methods import adding_plan
from sparsekv.indexing.plan import Progress

FIXED = (
    *("output", "max_tokens", "sinks", "tail", "prefill", "rope_scaling", "raw", "special_tokens", "force"),
    *("kv_dtype", "ray", "workers", "from_file", "encoding"),
)
"""Options that say how a document becomes an index."""


def index_among(documents: Sequence[str], *, ranks: bool) -> Path | None:
    """The index that is named in the place of a document, if one is.

    Raises:
        UsageError: other documents are named beside it, or several processes are to build it.
    """
    folder = next((Path(one) for one in documents if (Path(one) / MANIFEST).is_file()), None)
    if folder is not None and (len(documents) > 1 or ranks):
        by_ranks = f"leave --gpus out, or name its document, with --output {shlex.quote(str(folder))}"
        what = by_ranks if ranks else "name it alone"
        raise UsageError(f"{folder} is an index, to which methods would be added; {what}")
    return folder


def add_methods(folder: Path, recipe: BuildRecipe, given: Iterable[str], show: Progress) -> None:
    """Build the methods of a recipe into an index.

    Args:
        given: those of `FIXED` that are on the command line.

    Raises:
        UsageError: there is one, which the index has decided already.
        SparsekvError: the index or its model cannot be used.
    """
    for option in given:
        named = option.replace("_", "-")
        raise UsageError(f"--{named}: {folder} is an index, whose text and rows stay as they are; leave the option out")
    artifact = Artifact(folder, mending=True)
    before = artifact.manifest
    refuse_other_dtype(before, recipe.dtype)
    opened = load_for(artifact, recipe.model, recipe.device, recipe.dtype, quiet=recipe.quiet)
    plan = adding_plan(artifact, opened.loaded, recipe.config.methods, chunk_size=recipe.config.chunk_size)
    manifest = build_index(plan, folder, show, tell=partial(note, quiet=recipe.quiet))
    changed = {name for name, made in manifest.methods.items() if before.methods.get(name) != made}
    for told, names in (("added", changed - before.methods.keys()), ("built anew", changed & before.methods.keys())):
        if names:
            note(f"{told}: {', '.join(sorted(names))}", quiet=recipe.quiet)
    tell_built(folder, before, manifest, quiet=recipe.quiet)
