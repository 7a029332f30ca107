"""Loading models for a command: quietly, and as an index says it was built."""

import transformers

from sparsekv.cli.console import note
from sparsekv.formats.reader import Artifact
from sparsekv.indexing.identify import identify
from sparsekv.indexing.models import LoadedModel, load_model
from sparsekv.runtime.open import OpenIndex, open_index


def load(name: str, device: str, dtype: str, rope_scaling: str | None, *, quiet: bool) -> LoadedModel:
    """A model and its tokenizer; keeps transformers' advice off a person's screen."""
    transformers.logging.set_verbosity_error()
    return load_model(
        name, device=device, dtype=dtype, rope_scaling=rope_scaling, progress=lambda text: note(text, quiet=quiet)
    )


def load_for(artifact: Artifact, name: str | None, device: str, dtype: str, *, quiet: bool) -> OpenIndex:
    """Open an index with a model: by default the one that built it, in the dtype and with the RoPE it had then.

    Raises:
        UsageError: no such model, device or dtype.
        IdentityError: the index does not belong to this model.
    """
    manifest = artifact.manifest
    dtype = manifest.dtype if dtype == "auto" else dtype
    loaded = load(name or manifest.model.id, device, dtype, manifest.rope.scaling, quiet=quiet)
    return open_index(artifact, loaded.model, loaded.tokenizer, identify(loaded))
