"""A tiny random model of every family of causal language models that the installed transformers has."""

import math
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .tiny_models import (
    END,
    FAMILIES,
    PAD,
    POSITIONS,
    START,
    VOCABULARY,
    WINDOW,
    save_tiny,
    tiny_tokenizer,
)

Fields = dict[str, Any]
LAYERS, HEADS, KV_HEADS, CHANNELS, WIDTH, INNER, EXPERTS = 4, 4, 2, 16, 64, 96, 4

SIZES: tuple[tuple[str, int], ...] = (
    (r"(max|n|num|max_target)_position(_embedding)?s(_embeddings)?|n_ctx|max_seq_len|model_max_length", POSITIONS),
    (r"original_max_position_embeddings|context_length", POSITIONS),
    (r".*vocab_size.*", VOCABULARY),
    (r"num_hidden_layers|n_layers?|num_layers|(de|en)coder_layers|num_(de|en)coder_layers|num_blocks|depth", LAYERS),
    (r"num_key_value_heads|num_kv_heads|kv_n_heads|swa_num_key_value_heads|num_query_groups", KV_HEADS),
    (r"(num_|swa_num_)?(attention_)?heads|n_heads?|(num_)?(de|en)coder_attention_heads|index_n_heads", HEADS),
    (r"linear_num_(key|value)_heads", HEADS),
    (r"(swa_|index_|linear_key_|linear_value_|v_|attention_|qk_)?head_dim|dim_head|d_head|d_kv|kv_channels", CHANNELS),
    (r"attention_head_size", CHANNELS),
    (r"qk_nope_head_dim|qk_rope_head_dim|rotary_dim", CHANNELS // 2),
    (r"global_head_dim", 2 * CHANNELS),
    (r"(q|kv|o)_lora_rank", CHANNELS),
    (r"hidden_size(_global)?|d_model|n_embd|embed(ding)?_(dim|size)|emb_dim|word_embed_proj_dim|lru_width", WIDTH),
    (r"(attention|out|router)_hidden_size|dim_model_base|(in|out)put_embedding_size", WIDTH),
    (r"adapter_(in|out)_dim|adapter_input_size", WIDTH),
    (r".*intermediate_size(_mlp)?|.*ffn_dim|.*ffn_hidden_size|dff|dim_ff|d_inner|feed_forward_size", INNER),
    (r"n_routed_experts|num_(local_)?experts|moe_num_experts", EXPERTS),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|top_k_experts", 2),
    (r"n_shared_experts|num_shared_experts|n_group|topk_group|num_expert_group|moe_num_shared_experts", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"sliding_window(_size)?|attention_chunk_size|(attention_)?window_size", WINDOW),
    (r"mamba_d_state|state_size|ssm_state_size|hidden_size_per_layer_input|laurel_rank|adapter_rank", 8),
    (r"pad_token_id", PAD),
    (r"bos_token_id", START),
    (r"eos_token_id", END),
)
"""Patterns of the names of configs' fields, with the fields' values in a tiny model. The first matching pattern
applies."""
SPECIAL_TOKENS = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}
NESTED = ("decoder", "text_encoder", "audio_encoder")
"""Names of nested configs that do not end with `config`."""

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
INDEXER = {
    "indexer_n_heads": HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": CHANNELS,
    "indexer_budget": WINDOW,
    "indexer_compress_ratio": 4,
}
CHANGES: dict[str, Fields] = {
    "axk2": {"index_topk": WINDOW},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0, "attn_pdrop": 0.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v32": {"index_topk": WINDOW},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"per_layer_config": {}, "head_dim": CHANNELS},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": CHANNELS},
    "dory": {"layer_types": ALTERNATING, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "gemma3n_text": {"layer_types": ALTERNATING, "num_kv_shared_layers": 2},
    "glm_moe_dsa": {"index_topk": WINDOW},
    "gemma4_assistant": {"layer_types": ALTERNATING, "num_kv_shared_layers": LAYERS, "per_layer_config": {}},
    "gemma4_unified_assistant": {"layer_types": ALTERNATING, "num_kv_shared_layers": 2, "per_layer_config": {}},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "falcon_h1": {"mamba_chunk_size": 16},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"head_dim": CHANNELS},
    "hunyuan_v1_moe": {"head_dim": CHANNELS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": CHANNELS},
    "nemotron_h": {"chunk_size": 16},
    "nemotron": {"num_key_value_heads": KV_HEADS},
    "qwen4_exp": INDEXER,
    "qwen4_exp_text": INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [WIDTH // 2] * 2},
    "xlstm": {"embedding_dim": WIDTH},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * CHANNELS,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "mamba_headdim": 16,
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * CHANNELS,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Further fields of a family's tiny config, by family."""


def families() -> list[str]:
    """Return the names of the families, which are the values of `model_type` in configs."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def default_fields(family: str) -> Fields:
    """Return the default fields of a family's config; a few families need arguments for them."""
    needs: Fields = (
        {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
        if family == "gemma4_assistant"
        else {}
    )
    return CONFIG_MAPPING[family](**needs).to_dict()


def variants(family: str) -> dict[str, Fields]:
    """Return named changes of config fields by which a family attends in other ways; the empty name has no changes."""
    try:
        fields = default_fields(family)
    except Exception:  # the sweep reports the failure
        return {"": {}}
    fields = fields.get("text_config") or fields
    found: dict[str, Fields] = {"": {}}
    if "sliding_window" in fields:
        windows = {"sliding_window": WINDOW} | ({"use_sliding_window": True} if "use_sliding_window" in fields else {})
        if set(fields.get("layer_types") or ()) <= set(ALTERNATING):
            found["windows"] = windows | ({"layer_types": ALTERNATING} if "layer_types" in fields else {})
        if not fields.get("layer_types") and family != "moshi":
            found["no windows"] = {"sliding_window": None}
    if fields.get("num_kv_shared_layers") is not None and not family.endswith("assistant"):
        found["shared"] = {"num_kv_shared_layers": 2, "layer_types": ALTERNATING}
        found["unshared"] = {"num_kv_shared_layers": 0, "layer_types": ALTERNATING}
    if family.startswith("gemma4"):
        found = {name: change and change | {"per_layer_config": {}} for name, change in found.items()}
    if fields.get("kv_lora_rank"):
        found["equal sizes"] = {"v_head_dim": CHANNELS, "qk_nope_head_dim": CHANNELS // 2}
    return found


def has_plan(family: str) -> bool:
    """Whether the installed transformers can split the family over ranks."""
    return family in families() and bool(tiny_config(family).base_model_tp_plan)


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Return a family's own default config with tiny sizes; `changes` are applied to the text model's fields."""
    kind = CONFIG_MAPPING[family]
    fields = shrunk(default_fields(family))
    text = fields.get("text_config") or fields
    text.update(CHANGES.get(family, {}) | changes)
    return kind(**{name: value for name, value in fields.items() if name not in ("transformers_version", "model_type")})


def shrunk(fields: Fields) -> Fields:
    """Return a config's fields with tiny sizes.

    A list with an entry per layer keeps the entries of the remaining layers.
    """
    stay = _layers_that_stay(fields)
    small = {name: _shrunk(name, value, fields, stay) for name, value in fields.items()}
    if small.get("kv_lora_rank"):
        small |= {name: HEADS for name in ("num_key_value_heads",) if name in small}
    if "qk_rope_head_dim" in small and "head_dim" in small:
        small["head_dim"] = small["qk_rope_head_dim"]  # head_dim is the number of channels that RoPE rotates
    return small


def _shrunk(name: str, value: Any, fields: Fields, stay: list[int]) -> Any:
    if isinstance(value, dict) and (name.endswith("_config") or name in NESTED):
        if name == "per_layer_config":
            layers = {int(layer): one for layer, one in value.items()}
            return {
                new: shrunk(layers[old]) | ({"head_dim": 2 * CHANNELS} if "head_dim" in layers[old] else {})
                for new, old in enumerate(stay)
                if old in layers
            }
        return shrunk(value)
    if isinstance(value, list) and value and len(value) == _layers(fields):
        return [_shrunk(name, value[layer], fields, stay) for layer in stay]
    if name in SPECIAL_TOKENS and not isinstance(value, list):
        return SPECIAL_TOKENS[name]
    if isinstance(value, int) and not isinstance(value, bool) and value:
        return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), value)
    return value


def _layers(fields: Fields) -> int:
    names = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
    return next((fields[name] for name in names if isinstance(fields.get(name), int)), 0)


def _layers_that_stay(fields: Fields) -> list[int]:
    """Return the indices of the LAYERS layers that a tiny config keeps, with one of each kind if possible."""
    layers = _layers(fields)
    kinds = fields.get("layer_types") or fields.get("layers_block_type") or [""] * layers
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:LAYERS]
    others = [layer for layer in range(layers) if layer not in first]
    return sorted(first + others[: LAYERS - len(first)])


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a random model, the same each time, with peaked attention and with states that last for many tokens."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.randn_like(parameter) - 4)
            elif parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif parameter.is_floating_point():
                parameter.copy_(torch.randn_like(parameter) * min(0.2, 2 / math.sqrt(parameter.shape[-1])))
    return model


def save_family(folder: Path, family: str) -> Path:
    """Write a family's tiny model and the tokenizer as a folder that `from_pretrained` loads; returns the folder."""
    if family in FAMILIES:
        return save_tiny(folder, family)
    tiny_model(tiny_config(family)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
