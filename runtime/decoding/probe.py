"""The probe: whether a model attends over an index as it did when the index was built."""

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from sparsekv.formats.errors import ArtifactError, IdentityError
from sparsekv.formats.manifest import REBUILD
from sparsekv.formats.probe import difference, is_over_exact, probe_tolerance
from sparsekv.formats.reader import Artifact
from sparsekv.formats.schema import Manifest
from sparsekv.kernels.common.given_rows import Pair, Rows, logits_over_rows
from sparsekv.runtime.decoding.few_rows_linear import all_cores

ROW_TOLERANCE = 4
"""How many times as far as logits, relatively, a layer's rows of one token may be from the stored ones: rounding adds
up over layers."""


def compare_probe(artifact: Artifact, model: PreTrainedModel, last: int, rows: Rows) -> None:
    """Compute the logits after the last prompt token and compare them with those that the index stores.

    The model runs its own attention, in which none of ours takes part, so that a model with a mask of its own is
    refused whatever ours does with it. It attends to the token's stored rows too, which are compared with those that it
    computes.

    Args:
        last: the token's id.
        rows: returns a layer's stored keys and values of all tokens.

    Raises:
        IdentityError: they differ beyond rounding, so the index was built with another model, or with one that attended
            otherwise.
        ArtifactError: its tensors have other sizes than the model's.
    """
    compared: list[Pair] = []

    def given(layer: int, own: Pair) -> Pair:
        _check_heads(artifact, layer, own[0])
        stored = rows(layer, own)
        compared.append((_apart(own[0], stored[0]), _apart(own[1], stored[1])))
        return stored

    manifest = artifact.manifest
    with all_cores(model):
        logits = logits_over_rows(model, torch.tensor([last]), manifest.split.tokens - 1, given)[-1]
    off = difference(manifest.probe, logits)
    if not off <= probe_tolerance(manifest, model.dtype, over_exact=is_over_exact(manifest)):
        stored, found = f"{manifest.probe.logits[0]:.4f} at its top", f"{logits[manifest.probe.token_ids[0]]:.4f}"
        raise _other(manifest, "logits", stored, f"{found}, {off:.1%} away")
    if manifest.kv_storage is not None:  # rounding may choose another expert for the token, whose rows then are others
        return
    rows_off = float(torch.stack([torch.stack(pair) for pair in compared]).amax())
    if not rows_off <= ROW_TOLERANCE * probe_tolerance(manifest, model.dtype, over_exact=False):
        raise _other(manifest, "keys and values", "the stored ones", f"{rows_off:.1%} away")


def behind_zeros(pair: Pair, first: int) -> Pair:
    """Keys and values [Hk, T, D] with `first` rows of zeros before them; the rows themselves, if none."""
    return pair if not first else (pad(pair[0], (0, 0, first, 0)), pad(pair[1], (0, 0, first, 0)))


def _other(manifest: Manifest, part: str, stored: str, found: str) -> IdentityError:
    return IdentityError(
        f"the probe ({part} of the last prompt token over the stored context)",
        stored,
        found,
        "these are other weights, or the model masks other tokens than it did: use the model it was built with "
        f"(--model {manifest.model.id}) or build the index again for this one",
    )


def _apart(own: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """How far a token's rows [Hk, 1, D] are from the last stored ones [Hk, T, D], relative to these."""
    last = stored[:, -1:].float()
    apart: torch.Tensor = (own.float() - last).norm() / last.norm().clamp(min=torch.finfo(torch.float32).tiny)
    return apart


def _check_heads(artifact: Artifact, layer: int, keys: torch.Tensor) -> None:
    """Raise ArtifactError where a layer's tensors have other sizes than the model's: files may say what they like."""
    layers, (heads, _, channels) = len(artifact.manifest.layers), keys.shape
    if layer >= layers:
        raise ArtifactError(f"{artifact.folder} has {layers} layers, and the model more; {REBUILD}")
    if (found := artifact.heads_and_channels(layer)) != (heads, channels):
        has, wants = f"{found[0]} heads of {found[1]} channels", f"{heads} of {channels}"
        raise ArtifactError(f"layer {layer} of {artifact.folder} has {has}, and the model {wants}; {REBUILD}")
