"""Opening an index with the model that built it, or with another that the user names."""

from collections.abc import Callable

from sparsekv.formats.reader import Artifact
from sparsekv.indexing.models.identify import identify
from sparsekv.indexing.models.load import load_model
from sparsekv.indexing.models.named import named_by_index, remember
from sparsekv.runtime.decoding.open import OpenIndex, open_index


def load_and_open(
    artifact: Artifact,
    model: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: Callable[[str], None] = lambda text: None,
    *,
    hold: bool = False,
) -> OpenIndex:
    """Open an index with a model: by default the one that built it, in the dtype and with the RoPE scaling it had then.

    Args:
        model: a local folder or a hub id; it may be loaded again later because an index names it.
        dtype: `auto` is the index's.
        progress: called with one line at the start of each step that takes a while.
        hold: keep the keys and values that the checks read to a GPU, for the cache that is made next.

    Raises:
        SparsekvError: no model is given, and the user has never named the one that the index names.
        UsageError: no such model, device or dtype.
        IdentityError: the index does not belong to this model.
    """
    manifest = artifact.manifest
    loaded = load_model(
        named_by_index(manifest.model.id, progress) if model is None else model,
        device=device,
        dtype=manifest.dtype if dtype == "auto" else dtype,
        rope_scaling=manifest.rope.scaling,
        progress=progress,
    )
    if model is not None:
        remember(loaded.name)
    return open_index(artifact, loaded.model, loaded.tokenizer, identify(loaded), hold=hold)
