"""Fingerprints of what decides K and V in a model and a tokenizer, computed from plain values."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from sparsekv.formats.checksums import hash_bytes, hash_json
from sparsekv.formats.schema import ModelIdentity, TokenizerIdentity

# Every config field that changes K, V or how they are attended, over the families this project supports.
KV_FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
    "hidden_activation",
    "num_experts_per_tok",
    "rope_parameters",
    "partial_rotary_factor",
    "no_rope_layers",
    "layer_types",
    "sliding_window",
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
)
SAMPLES_PER_TENSOR = 256


def fingerprint_weights(state: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash of names, shapes and 256 evenly spaced values of each tensor, rounded to bfloat16.

    Reading only a sample keeps opening fast for large models; rounding makes the hashes of one checkpoint equal in
    float32 and bfloat16. The manifest's probe is there for changes that the sample misses.
    """
    parts = []
    for name, tensor in sorted(state):
        flat = _whole(tensor.detach()).reshape(-1)
        stride = max(1, flat.numel() // SAMPLES_PER_TENSOR)
        sample = flat[::stride][:SAMPLES_PER_TENSOR]
        sample = sample.to(torch.bfloat16) if sample.is_floating_point() else sample
        digest = hash_bytes(sample.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        parts.append([name, list(tensor.shape), digest])
    return hash_json(parts)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or, where ranks share it, all of it; they gather one at a time, together."""
    gather = getattr(tensor, "full_tensor", None)  # of a DTensor, which a single process need not import
    return tensor if gather is None else gather()


def identify_model(
    name: str,
    revision: str | None,
    config: Mapping[str, Any],
    state: Iterable[tuple[str, torch.Tensor]],
    adapter: str | None,
) -> ModelIdentity:
    """Identity of a model from its text config as a mapping and its named weights."""
    kv_config = {field: config[field] for field in KV_FIELDS if config.get(field) is not None}
    kv_config = json.loads(json.dumps(kv_config))
    quantisation = config.get("quantization_config")
    return ModelIdentity(
        id=name,
        revision=revision,
        kv_config=kv_config,
        config_hash=hash_json(kv_config),
        weights_hash=fingerprint_weights(state),
        adapter=adapter,
        quantisation=None if quantisation is None else json.dumps(quantisation, sort_keys=True, default=str),
    )


def identify_tokenizer(
    serialized: str, chat_template: str | None, special_tokens: Mapping[str, Any]
) -> TokenizerIdentity:
    """Identity of a tokenizer from its own serialisation, its chat template and its special tokens."""
    return TokenizerIdentity(
        tokenizer_hash=hash_bytes(serialized.encode()),
        chat_template_hash=None if chat_template is None else hash_bytes(chat_template.encode()),
        special_tokens_hash=hash_json({name: str(token) for name, token in special_tokens.items()}),
    )
