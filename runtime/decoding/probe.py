"""The probe: whether a model computes over an index what the model computed that built it."""

import torch
from transformers import PreTrainedModel

from sparsekv.formats.errors import ArtifactError, IdentityError, SparsekvError
from sparsekv.formats.kv_storage import KVDtype
from sparsekv.formats.manifest import REBUILD
from sparsekv.formats.reader import Artifact
from sparsekv.formats.schema import Manifest
from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.kernels.common.mask import UnsupportedAttentionError
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.few_rows_linear import all_cores

# Largest difference of a probe's logits, relative to the largest logit, that rounding can cause.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}

# The same for what storing in 8 bits changes: 0.003 for the embedded model over 6,144 tokens, at most 0.02 for random
# models of every family. Other weights are further off: 0.15 where each of the embedded model's is off by 10% of their
# standard deviation (docs/reference/eight-bits.md).
STORING_TOLERANCE: dict[KVDtype, float] = {"int8": 5e-2}


@torch.inference_mode()
def compare_probe(artifact: Artifact, model: PreTrainedModel, last: int, cache: IndexCache) -> None:
    """Compute the logits after the last prompt token and compare them with those that the index stores.

    Args:
        last: the token's id.
        cache: the stored context before it.

    Raises:
        IdentityError: they differ beyond rounding, so the index was built with another model.
        ArtifactError: its tensors have other sizes than the model's.
        SparsekvError: the model attends in a way that no index can follow.
    """
    probe = artifact.manifest.probe

    def attend(call: AttentionCall) -> torch.Tensor:
        _check_heads(artifact, call)
        return cache.attend(call)

    with route_attention(model, attend), all_cores(model):
        ids = torch.tensor([[last]], device=model.device)
        try:
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1].float().cpu()
        except UnsupportedAttentionError as error:
            raise SparsekvError(str(error)) from error
    stored = torch.tensor(probe.logits)
    difference = float((logits[probe.token_ids] - stored).abs().max() / stored.abs().max())
    if not difference <= _tolerance(artifact.manifest, model.dtype):
        raise IdentityError(
            "the probe (logits of the last prompt token over the stored context)",
            f"{probe.logits[0]:.4f} at its top",
            f"{logits[probe.token_ids[0]]:.4f}, {difference:.1%} away",
            "these are other weights: use the model it was built with "
            f"(--model {artifact.manifest.model.id}) or build the index again for this one",
        )


def _check_heads(artifact: Artifact, call: AttentionCall) -> None:
    """Raise ArtifactError where a layer's tensors have other sizes than the model's: files may say what they like."""
    layers, (heads, _, channels) = len(artifact.manifest.layers), call.keys.shape
    if call.layer >= layers:
        raise ArtifactError(f"{artifact.folder} has {layers} layers, and the model more; {REBUILD}")
    if (found := artifact.heads_and_channels(call.layer)) != (heads, channels):
        has, wants = f"{found[0]} heads of {found[1]} channels", f"{heads} of {channels}"
        raise ArtifactError(f"layer {call.layer} of {artifact.folder} has {has}, and the model {wants}; {REBUILD}")


def _tolerance(manifest: Manifest, dtype: torch.dtype) -> float:
    """The largest difference for a model in a dtype."""
    rounding = max(PROBE_TOLERANCE[dtype], PROBE_TOLERANCE[_dtype(manifest.dtype)])
    return rounding if manifest.kv_storage is None else max(rounding, STORING_TOLERANCE[manifest.kv_storage.dtype])


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
