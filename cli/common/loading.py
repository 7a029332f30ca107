"""Loading models for a command: transformers' own advice stays off the user's screen, progress goes to stderr."""

import os
from collections.abc import Callable
from functools import partial

import transformers

from sparsekv.cli.common.console import note
from sparsekv.formats.errors import UsageError
from sparsekv.formats.models.embedded import EMBEDDED
from sparsekv.formats.models.load import LoadedModel, load_model
from sparsekv.formats.models.named import remember
from sparsekv.formats.reader import Artifact
from sparsekv.kernels.attention.first_kernel import launch_first_kernel
from sparsekv.runtime.decoding.load import load_and_open
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.selection.registry import methods


def load(name: str | None, device: str, dtype: str, rope_scaling: str | None, *, quiet: bool) -> LoadedModel:
    """A model and its tokenizer, the embedded one where none is named; raises what `load_model` raises.

    A model that is named here may be loaded again later because an index names it.
    """
    transformers.logging.set_verbosity_error()
    _refuse_method(name)
    progress = partial(note, quiet=quiet)
    loaded = load_model(
        EMBEDDED if name is None else name,
        device=device,
        dtype=dtype,
        rope_scaling=rope_scaling,
        progress=progress,
        meanwhile=launch_first_kernel,
    )
    if name is not None:
        remember(loaded.name)
    return loaded


def load_for(
    artifact: Artifact,
    name: str | None,
    device: str,
    dtype: str,
    *,
    quiet: bool,
    hold: bool = False,
    loaded_in: Callable[[float], None] = lambda seconds: None,
) -> OpenIndex:
    """An index, opened with a model; raises what `load_and_open` raises, whose last two arguments these are."""
    transformers.logging.set_verbosity_error()
    _refuse_method(name)
    return load_and_open(artifact, name, device, dtype, partial(note, quiet=quiet), hold=hold, loaded_in=loaded_in)


def _refuse_method(model: str | None) -> None:
    """Raise UsageError where a method is named as a model: -m is --model."""
    if model in methods() and not os.path.isdir(model):
        raise UsageError(f"--model {model}: {model} is a method, not a model; give it as --method {model}")
