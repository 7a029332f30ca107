"""Check that an index fits a model as an engine serves it, and that its rows can be loaded into a paged KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sparsekv.formats.errors import REBUILD, ArtifactError
from sparsekv.formats.index.identity import check_model, check_tokenizer, identify_model
from sparsekv.formats.index.manifest import COARSEST, PROBE_TOLERANCE, ROW_TOLERANCE, probe_tolerance
from sparsekv.formats.index.reader import Artifact, ArtifactShare
from sparsekv.formats.index.schema import Manifest, ModelIdentity, TokenizerIdentity
from sparsekv.formats.models.load import identify, load_description, load_model, tokenizer_identity
from sparsekv.formats.models.rope import rope_depends_on_length

if TYPE_CHECKING:  # transformers takes a second to import
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class ServedModel:
    """Identity of the model and the tokenizer that an engine serves.

    Attributes:
        dtype: dtype in which the weights were hashed, as `check_model` takes it.
    """

    model: ModelIdentity
    tokenizer: TokenizerIdentity
    dtype: str

    def check(self, manifest: Manifest) -> None:
        """Raise SparsekvError if an index has another model or tokenizer, and the errors of `check_continuable`."""
        check_model(manifest, self.model, self.dtype)
        check_tokenizer(manifest, self.tokenizer)
        check_continuable(manifest)


def identify_served(model: str, tokenizer: str, config: "PreTrainedConfig", rounding: str | None) -> ServedModel:
    """Identify a served model and its tokenizer. Maps the weights into memory, reads a sample, and releases them.

    Args:
        model, tokenizer: folders on this machine.
        config: the text config with which the engine runs the model, including the engine's overrides.
        rounding: the method by which the engine itself quantises the checkpoint's weights; None: it quantises nothing.

    Raises:
        SparsekvError: the model or the tokenizer cannot be loaded.
    """
    own, _ = load_description(model, None, _quiet)
    stored = own.dtype or own.get_text_config().dtype
    dtype = str(stored if isinstance(stored, torch.dtype) else torch.bfloat16).removeprefix("torch.")
    identity, _ = identify(load_model(model, device="cpu", dtype=dtype))
    served = identify_model(identity.id, None, config.to_dict(), identity.weights_hash, identity.adapter)
    changes = {"quantisation": identity.quantisation, "weights": rounding}
    _, its_tokenizer = load_description(tokenizer, None, _quiet)
    return ServedModel(served.model_copy(update=changes), tokenizer_identity(its_tokenizer), dtype)


def check_continuable(manifest: Manifest) -> None:
    """Raise ArtifactError if an engine that loads an index's rows computes other rows after them than the build did.

    This is so after a sparse prefill, with RoPE that depends on the length, and for layers with a state, which no rows
    store.
    """
    if manifest.states:
        raise ArtifactError("its model has layers that keep a state, which is not loaded into an engine; use `serve`")
    if not manifest.prefill.exact:
        raise ArtifactError(
            f"its keys and values are those of a sparse prefill, {manifest.prefill}; build it with a dense one"
        )
    if rope_depends_on_length(manifest.model.kv_config.get("rope_parameters")):
        raise ArtifactError("its RoPE frequencies depend on the length of a sequence; use `serve`")


def share_of(index: Artifact, rank: int, size: int, shapes: Mapping[int, tuple[int, int]]) -> ArtifactShare:
    """Return the part of an index that has the KV heads of one of an engine's tensor-parallel workers.

    With more workers than heads, several workers have the same head.

    Args:
        rank: number of the worker, from 0 to `size` - 1.
        shapes: KV heads and channels of the layers that the worker has, by layer.

    Raises:
        ArtifactError: layers, heads or channels are not those of the index.
    """
    wrong = ArtifactError(f"it has other layers, heads or channels than the engine's model; {REBUILD}")
    if not shapes.keys() <= index.manifest.attending.keys():
        raise wrong
    own = {}
    for layer in index.manifest.attending:
        heads, channels = index.heads_and_channels(layer)
        own[layer] = heads // min(size, heads)
        if shapes.get(layer, (own[layer], channels)) != (own[layer], channels):
            raise wrong
    parts = min(size, heads)
    return ArtifactShare(index, rank * parts // size, parts, own)


FACTOR = 2
"""Factor by which the tolerance for an engine's rows exceeds that of logits. Rounding errors add up over layers.

On the embedded model, wrong heads in one of 30 layers change the next tokens' rows by 14%, and bfloat16 by 1.3%.
"""


def row_tolerance(manifest: Manifest, dtype: torch.dtype, *, rounded: bool) -> float:
    """Return the largest relative distance of computed rows from the index's rows that counts as rounding.

    Args:
        dtype: dtype of the engine's model.
        rounded: whether the engine stores keys and values in fewer bits than the model's dtype.
    """
    tolerance = probe_tolerance(manifest, dtype, over_exact=manifest.kv_storage is not None)
    return ROW_TOLERANCE * max(tolerance, PROBE_TOLERANCE[COARSEST]) if rounded else FACTOR * tolerance


def check_rows(manifest: Manifest, distances: list[float], tolerance: float) -> float:
    """Return the largest of the layers' distances between rows that an engine computed and the index's rows.

    With int8 rows the median over layers is returned, because rounding may route a token to another expert.

    Args:
        distances: relative distance of the computed rows, for each layer.

    Raises:
        ArtifactError: the returned distance would be larger than the tolerance.
    """
    found = torch.tensor(distances)
    off = float(found.amax() if manifest.kv_storage is None else found.median())
    if not off <= tolerance:
        raise ArtifactError(
            f"over its rows the engine computes keys and values that are {off:.1%} from the stored ones, "
            f"and rounding explains {tolerance:.1%}: its files are damaged (see `sparsekv inspect --verify`), or this "
            f"engine attends differently than the model of the build; {REBUILD}"
        )
    return off


def _quiet(text: str) -> None:
    """Print no progress."""
