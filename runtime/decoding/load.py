"""Open an index with the model that built it, or with another model that the user names."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.embedded import named_by_index, remember
from sparsekv.formats.models.load import identify, load_model
from sparsekv.kernels.common.first_calls import make_first_calls
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.decoding.prepare import EarlyReading

if TYPE_CHECKING:  # only needed with several ranks: it imports torch.distributed
    from sparsekv.formats.distributed.group import Ranks


def load_and_open(
    artifact: Artifact,
    model: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: Callable[[str], None] = lambda text: None,
    *,
    hold: bool = False,
    loaded_in: Callable[[float], None] = lambda seconds: None,
    ranks: "Ranks | None" = None,
    early: EarlyReading | None = None,
) -> OpenIndex:
    """Load a model and open an index with it, by default the model that built the index.

    The model is loaded with the RoPE scaling that the index was built with, and by default in the index's dtype.

    Args:
        model: a local folder or a hub id; it is remembered, so that an index that names it may load it later.
        dtype: `auto` is the index's dtype.
        progress: called with one line at the start of each step that takes a while.
        loaded_in: called with the seconds that loading the model took, before the index is opened.
        hold: keep the keys and values that the checks read, copied to a GPU or mapped, for the next cache.
        ranks: the processes that share the model; each opens its own heads.
        early: a reading of this index's files that has already begun.

    Raises:
        SparsekvError: no model is given, and the user has never named the model that the index names.
        UsageError: the model, device or dtype does not exist.
        IdentityError: the index does not belong to this model.
    """
    started = time.perf_counter()
    early = None if ranks is not None else (early or EarlyReading(artifact, device, hold=hold)).begin_loading()
    manifest = artifact.manifest
    if ranks is not None and ranks.size > 1:
        # Imported here, because it imports torch.distributed.
        from sparsekv.kernels.distributed.row_style import sum_in_one_launch

        sum_in_one_launch()
    loaded = load_model(
        named_by_index(manifest.model.id, progress) if model is None else model,
        device=device,
        dtype=manifest.dtype if dtype == "auto" else dtype,
        rope_scaling=manifest.rope.scaling,
        progress=progress,
        meanwhile=make_first_calls,
        ranks=1 if ranks is None else ranks.size,
    )
    if model is not None and (ranks is None or ranks.first):
        remember(loaded.name)
    loaded_in(time.perf_counter() - started)
    if ranks is not None:
        from sparsekv.runtime.decoding.distributed import open_share  # imported here: it imports torch.distributed

        return open_share(artifact, loaded, ranks, hold=hold)
    its, files = identify(loaded, manifest), loaded.tokenizer_files
    return open_index(artifact, loaded.model, loaded.tokenizer, its, hold=hold, early=early, files=files)
