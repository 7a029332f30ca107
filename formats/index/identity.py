"""Compute the identity of a model and of its tokenizer, and compare both with those in an index's manifest."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from sparsekv.formats.checksums import hash_bytes, hash_json
from sparsekv.formats.errors import IdentityError
from sparsekv.formats.index.schema import Manifest, ModelIdentity, TokenizerIdentity, Weights

# Every config field that changes keys, values or attention in any model family that can be indexed. A test changes each
# number and activation of these families' configs, and each field without a value, to verify this. A dot separates a
# nested config from its field.
KV_FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleave",
    "num_kv_shared_layers",
    "rms_norm_eps",
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "mlp_hidden_act",
    "mamba_hidden_act",
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "num_expert_group",
    "moe_renormalize",
    "expert_selection_fn",
    "shared_expert_combination_strategy",
    "topk_method",
    "attn_config.clip_qkv",
    "ffn_config.ffn_act_fn",
    "ffn_config.moe_top_k",
    "ffn_config.moe_normalize_expert_weights",
    "rope_parameters",
    "position_embedding_type",
    "partial_rotary_factor",
    "layer_rope_theta",
    "no_rope_layers",
    "layer_types",
    "sliding_window",
    "attn_logit_softcapping",
    "clip_qkv",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "scale_emb",
    "scale_depth",
    "key_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
    "ssm_multipliers",
    "mlp_multipliers",
    "mamba_norm_before_gate",
    "mamba_chunk_size",
    "chunk_size",
    "time_step_min",
    "time_step_max",
    "time_step_limit",
    "linear_allow_neg_eigval",
    "kda_safe_gate",
    "kda_lower_bound",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_eps",
    "norm_epsilon",
    "mup_enabled",
    "scale_attn_weights",
    "use_bidirectional_attention",
    "altup_active_idx",
    "altup_correct_scale",
    "activation_sparsity_pattern",
    "swiglu_alpha",
    "swiglu_limit",
    "moe_k",
    "moe_topk",
    "moe_norm_min",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "route_scale",
    "routed_scaling_factor",
    "router_scaling_factor",
    "moe_routed_scaling_factor",
    "moe_router_logit_softcapping",
    "router_jitter_noise",
)
LOGIT_FIELDS = (
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier",
    "dim_model_base",
)
"""Config fields that change logits, but neither keys, values nor attention, in the same families."""
SAMPLES_PER_TENSOR = 256
ORIGINAL = "the checkpoint's"
"""Name of unrounded weights in messages."""


def fingerprint_weights(state: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash the names and shapes of a model's tensors, and at most 256 values of each (see `_sample`).

    Only a sample is read, so that an index of a large model opens fast. Floating-point values are rounded to bfloat16,
    so a checkpoint has the same hash whether it is loaded in float32 or bfloat16.

    Weights that differ only outside the sample have the same hash. They are noticed only if they change the probe (the
    logits of the last prompt token, which are stored at the build and recomputed at each opening) beyond its tolerance.
    """
    named = sorted(_stored_tensors(state), key=itemgetter(0))
    digests = _hash_samples([_sample(tensor.detach()) for _, tensor in named])
    return hash_json(
        [[name, list(tensor.shape), digest] for (name, tensor), digest in zip(named, digests, strict=True)]
    )


def _stored_tensors(state: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield named tensors. A tensor that wraps others, such as quantised weights, is replaced by the wrapped tensors.

    A tensor that is sharded over ranks is yielded as it is.
    """
    for name, tensor in state:
        inner = getattr(tensor, "__tensor_flatten__", None)
        if inner is None or hasattr(tensor, "full_tensor"):
            yield name, tensor
        else:
            yield from _stored_tensors((f"{name}.{part}", getattr(tensor, part)) for part in inner()[0])


def _hash_samples(samples: Sequence[torch.Tensor]) -> list[str]:
    """Hash each sample. Samples of one dtype and device are concatenated and copied to the CPU together."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, sample in enumerate(samples):
        kinds.setdefault((sample.dtype, sample.device), []).append(place)
    digests = [""] * len(samples)
    for places in kinds.values():
        values = torch.cat([samples[place] for place in places])
        values = values.to(torch.bfloat16) if values.is_floating_point() else values
        pieces = values.cpu().split([samples[place].numel() for place in places])
        for place, piece in zip(places, pieces, strict=True):
            digests[place] = hash_bytes(piece.view(torch.uint8).numpy().tobytes())
    return digests


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return at most 256 values of a tensor. If the tensor is sharded over ranks, they are copies.

    Of n values, every floor(n / 256)-th is taken, beginning with the first, until there are 256. So the last values may
    be left out: of 257 to 511 values, the sample is the first 256.

    A sharded tensor is first gathered, so all ranks must call this together, one tensor at a time.
    """
    whole = getattr(tensor, "full_tensor", None)  # a method of DTensor, whose class is not imported
    flat = (tensor if whole is None else whole()).reshape(-1)
    stride = max(1, flat.numel() // SAMPLES_PER_TENSOR)
    sample = flat[::stride][:SAMPLES_PER_TENSOR]
    return sample if whole is None else sample.clone()


def identify_model(
    name: str,
    revision: str | None,
    config: Mapping[str, Any],
    weights_hash: str,
    adapter: str | None,
    weights: Weights | None = None,
) -> ModelIdentity:
    """Make a model's identity.

    Args:
        config: the model's text config as a mapping.
        weights_hash: the result of `fingerprint_weights` before weights were rounded.
        weights: the precision to which weights of linear layers were rounded after loading; None: not rounded.
    """
    of_rope = ("max_position_embeddings",) if _positions_scale_rope(config.get("rope_parameters") or {}) else ()
    fields = {field: _value(config, field) for field in (*KV_FIELDS, *of_rope)}
    kv_config: Any = {field: value for field, value in fields.items() if value is not None}
    kv_config = json.loads(json.dumps(kv_config), parse_constant=str)  # JSON has no infinite numbers
    quantisation = config.get("quantization_config")
    return ModelIdentity(
        id=name,
        revision=revision,
        kv_config=kv_config,
        config_hash=hash_json(kv_config),
        weights_hash=weights_hash,
        adapter=adapter,
        quantisation=None if quantisation is None else json.dumps(quantisation, sort_keys=True, default=str),
        weights=weights,
    )


def _value(config: Mapping[str, Any], field: str) -> Any:
    """Return the value of a field of KV_FIELDS; None if the config lacks it."""
    name, _, of_nested = field.partition(".")
    value = config.get(name)
    return _value(value or {}, of_nested) if of_nested else value


def _positions_scale_rope(parameters: Mapping[str, Any]) -> bool:
    """Whether keys depend on the config's `max_position_embeddings`.

    longrope and YaRN without a factor divide this number by the original number of positions.
    """
    kinds = [parameters, *(of_layers for of_layers in parameters.values() if isinstance(of_layers, Mapping))]
    return any(kind.get("rope_type") in ("longrope", "yarn") and kind.get("factor") is None for kind in kinds)


def identify_tokenizer(
    serialized: str, chat_template: str | None, special_tokens: Mapping[str, Any]
) -> TokenizerIdentity:
    """Make a tokenizer's identity from its own serialisation, its chat template and its special tokens."""
    return TokenizerIdentity(
        tokenizer_hash=hash_bytes(serialized.encode()),
        chat_template_hash=None if chat_template is None else hash_bytes(chat_template.encode()),
        special_tokens_hash=hash_json({name: str(token) for name, token in special_tokens.items()}),
    )


def check_model(manifest: Manifest, model: ModelIdentity, dtype: str) -> None:
    """Raise IdentityError at the first field in which the index's model differs from this model, loaded as `dtype`.

    A checkpoint has the same weight hash in float32 and bfloat16. float16 rounds differently, so weight hashes are not
    compared between float16 and other dtypes. Other weights are then noticed only by the probe: the logits of the last
    prompt token, which are recomputed at each opening.
    """
    stored, remedy = manifest.model, _model_remedy(manifest)
    for field in sorted(stored.kv_config.keys() | model.kv_config.keys()):
        _compare(f"model config {field}", stored.kv_config.get(field), model.kv_config.get(field), remedy)
    _compare("quantisation", _method(stored.quantisation), _method(model.quantisation), remedy)
    _compare("adapter", stored.adapter, model.adapter, remedy)
    _compare("precision of weights", stored.weights or ORIGINAL, model.weights or ORIGINAL, remedy)
    if (dtype == "float16") == (manifest.dtype == "float16"):
        _compare("model weights", stored.weights_hash[:12], model.weights_hash[:12], remedy)


def check_tokenizer(manifest: Manifest, tokenizer: TokenizerIdentity) -> None:
    """Raise IdentityError if the tokenizer, its special tokens or its chat template differs from the index's."""
    stored, remedy = manifest.tokenizer, _model_remedy(manifest)
    _compare("tokenizer", stored.tokenizer_hash[:12], tokenizer.tokenizer_hash[:12], remedy)
    _compare("special tokens", stored.special_tokens_hash[:12], tokenizer.special_tokens_hash[:12], remedy)
    _compare("chat template", _short(stored.chat_template_hash), _short(tokenizer.chat_template_hash), remedy)


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]


def _method(quantisation: str | None) -> str:
    """Return the method of a quantisation and a short hash of its settings, which may be pages long."""
    if quantisation is None:
        return "none"
    named = re.search(r'"quant_method": "([\w-]{1,40})"', quantisation)
    return f"{named.group(1) if named else 'unnamed'} {hash_bytes(quantisation.encode())[:12]}"


def _model_remedy(manifest: Manifest) -> str:
    return f"use the model it was built with (--model {manifest.model.id}) or build the index again for this one"


def _compare(field: str, built_with: Any, found: Any, remedy: str) -> None:
    if built_with != found:
        raise IdentityError(field, built_with, found, remedy)
