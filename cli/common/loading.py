"""Load models for a command, without transformers' messages."""

import transformers

from sparsekv.cli.common.console import note
from sparsekv.cli.common.named_models import named_by_index, remember
from sparsekv.formats.reader import Artifact
from sparsekv.indexing.models.embedded import EMBEDDED
from sparsekv.indexing.models.identify import identify
from sparsekv.indexing.models.load import LoadedModel, load_model
from sparsekv.runtime.decoding.open import OpenIndex, open_index


def load(name: str | None, device: str, dtype: str, rope_scaling: str | None, *, quiet: bool) -> LoadedModel:
    """A model and its tokenizer, the embedded one if `name` is None.

    A named model is remembered, so that an index built with it can be opened without naming it again.
    """
    loaded = _load(EMBEDDED if name is None else name, device, dtype, rope_scaling, quiet=quiet)
    if name is not None:
        remember(loaded.name)
    return loaded


def load_for(artifact: Artifact, name: str | None, device: str, dtype: str, *, quiet: bool) -> OpenIndex:
    """Open an index with a model: by default the one that built it, with the index's dtype and RoPE scaling.

    Raises:
        SparsekvError: no model was named, and the index names one that the user never named on this machine.
        UsageError: no such model, device or dtype.
        IdentityError: the index does not belong to this model.
    """
    manifest = artifact.manifest
    dtype = manifest.dtype if dtype == "auto" else dtype
    scaling = manifest.rope.scaling
    if name is None:
        loaded = _load(named_by_index(manifest.model.id, quiet=quiet), device, dtype, scaling, quiet=quiet)
    else:
        loaded = load(name, device, dtype, scaling, quiet=quiet)
    return open_index(artifact, loaded.model, loaded.tokenizer, identify(loaded))


def _load(name: str, device: str, dtype: str, rope_scaling: str | None, *, quiet: bool) -> LoadedModel:
    transformers.logging.set_verbosity_error()
    return load_model(
        name, device=device, dtype=dtype, rope_scaling=rope_scaling, progress=lambda text: note(text, quiet=quiet)
    )
