"""Tiny random models and tokenizers that a case draws; those of the last cases are kept."""

from collections.abc import Callable
from functools import lru_cache
from math import lcm
from random import Random
from typing import Any

import torch
from support.tiny_models import CHAT_TEMPLATE, COMMON, END, PAD, START, tiny_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from .case import Case

POSITIONS = 4096
STRETCH = 4
"""Factor by which scaled positions exceed those that a model was trained with."""
TURNED = 8
"""Number of channels that RoPE rotates in families of latent attention."""

SPACE_SIGN = "\u2581"


def _of_layers(window: int) -> Callable[[Case], dict[str, Any]]:
    """Return config changes by which every second layer has a sliding window, but never the last layer."""

    def changes(case: Case) -> dict[str, Any]:
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(case.layers)]
        kinds[-1] = "full_attention"
        return {"layer_types": kinds, "sliding_window": case.window or window}

    return changes


def _window_switched_on(case: Case) -> dict[str, Any]:
    if not case.window or case.layers < 2:
        return {}
    return {"use_sliding_window": True, "sliding_window": case.window, "max_window_layers": case.layers - 1}


def _gemma(case: Case) -> dict[str, Any]:
    return _of_layers(32)(case) | {"query_pre_attn_scalar": 9}


def _experts(case: Case) -> dict[str, Any]:
    return {"num_local_experts": 4, "num_experts_per_tok": 2}


def _many_experts(case: Case) -> dict[str, Any]:
    return {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _with_states(kind: str) -> Callable[[Case], dict[str, Any]]:
    """Return config changes by which every second layer keeps a state, but never the last layer."""

    def changes(case: Case) -> dict[str, Any]:
        kinds = ["full_attention" if layer % 2 else kind for layer in range(case.layers)]
        kinds[-1] = "full_attention"
        return {"layer_types": kinds}

    return changes


def _delta_rule(case: Case) -> dict[str, Any]:
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    return _with_states("linear_attention")(case) | sizes | heads | {"attn_output_gate": True}


def _mamba(case: Case) -> dict[str, Any]:
    return {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_chunk_size": 16}


def _latent(case: Case) -> dict[str, Any]:
    """Return the sizes of latent attention: keys and values of different sizes, with RoPE on some of the keys'
    channels."""
    sizes = {"qk_rope_head_dim": TURNED, "qk_nope_head_dim": case.head_dim - TURNED, "v_head_dim": case.head_dim - 4}
    heads = {"head_dim": TURNED, "num_key_value_heads": case.kv_heads * case.group}
    return sizes | heads | {"q_lora_rank": 16, "kv_lora_rank": 24, "first_k_dense_replace": case.layers}


FAMILIES: dict[str, Callable[[Case], dict[str, Any]]] = {
    "llama": lambda case: {},
    "qwen2": _window_switched_on,
    "qwen3": _window_switched_on,
    "mistral": lambda case: {"sliding_window": None},
    "smollm3": lambda case: {"no_rope_layer_interval": 2},
    "phi3": lambda case: {"sliding_window": None},
    "gemma": lambda case: {},
    "gemma2": lambda case: _gemma(case) | {"attn_logit_softcapping": case.softcap or 50.0},
    "gemma3_text": _gemma,
    "gpt_oss": lambda case: _of_layers(32)(case) | _experts(case),
    "qwen2_moe": lambda case: (
        _window_switched_on(case)
        | _many_experts(case)
        | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1}
    ),
    "qwen3_moe": lambda case: _many_experts(case) | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": lambda case: _experts(case) | {"sliding_window": None},
    "phimoe": lambda case: _experts(case) | {"sliding_window": case.window or None},
    "olmo2": lambda case: {},
    "olmo3": _of_layers(32),
    "granite": lambda case: {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "cohere": lambda case: {"use_qk_norm": False},
    "cohere2": _of_layers(32),
    "starcoder2": lambda case: {"sliding_window": None},
    "stablelm": lambda case: {},
    "glm4": lambda case: {},
    "exaone4": _of_layers(32),
    "nemotron": lambda case: {},
    "seed_oss": lambda case: {"attention_bias": True},
    "ernie4_5": lambda case: {},
    "qwen3_next": lambda case: _delta_rule(case) | _many_experts(case) | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": _delta_rule,
    "falcon_h1": _mamba,
    "lfm2": _with_states("conv"),
    "deepseek_v3": _latent,
    "doge": lambda case: {"sliding_window": case.window or None, "keep_window_size": 2048},
}
"""Config fields of each family, in addition to the common fields."""

WITH_STATES = ("qwen3_next", "qwen3_5_text", "falcon_h1", "lfm2")
"""Families in which layers keep a state, in addition to attention or instead of it; they need a dense prefill."""
OWN_HEAD_DIM = (
    "lfm2",
    "phi3",
    "phimoe",
    "olmo2",
    "olmo3",
    "starcoder2",
    "stablelm",
    "qwen2",
    "qwen2_moe",
    "granite",
    "cohere",
)
"""Families whose heads divide the hidden size."""
PARTIAL = ("phi3", "stablelm", "glm4", "nemotron")
"""Families that may rotate only some of a head's channels."""
BY_LAYER_TYPE = ("gemma3_text", "olmo3")
"""Families with RoPE parameters for each kind of layer."""
EAGER_ONLY = ("gemma2", "gpt_oss")
"""Families whose soft cap or learned sinks torch's own attention does not support."""


def ropes_of(family: str, ropes: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the kinds of scaled positions that a family's config supports."""
    if family in BY_LAYER_TYPE:
        return ()
    if family in WITH_STATES:
        return ()
    return {"phi3": ("longrope",), "phimoe": (), "deepseek_v3": ("yarn",)}.get(family, ropes)


def rope_parameters(case: Case) -> dict[str, Any]:
    """Return the config's RoPE parameters; the original length is within the document, so that scaling shows."""
    partial = {"partial_rotary_factor": 0.5} if case.family in PARTIAL else {}
    plain: dict[str, Any] = {"rope_type": case.rope, "rope_theta": 10000.0, **partial}
    original = {"original_max_position_embeddings": case.original}
    if case.rope == "linear":
        return plain | {"factor": 2.0}
    if case.rope == "dynamic":
        return plain | {"factor": 2.0}
    if case.rope == "yarn":
        return plain | original | {"factor": float(STRETCH), "beta_fast": 32.0, "beta_slow": 1.0}
    if case.rope == "llama3":
        return plain | original | {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if case.rope == "longrope":
        pairs = int(case.head_dim * partial.get("partial_rotary_factor", 1.0)) // 2
        random = Random(pairs)
        factors = {name: [round(1 + 3 * random.random(), 3) for _ in range(pairs)] for name in ("short", "long")}
        return plain | original | {f"{name}_factor": some for name, some in factors.items()} | {"factor": 4.0}
    return plain


def qwen_yarn(case: Case) -> dict[str, Any]:
    """Return Qwen's recipe of YaRN: `rope_scaling` by its older names, and the positions that the model was trained
    with."""
    scaling: dict[str, Any] = {"type": "yarn", "factor": float(STRETCH)}
    scaling["original_max_position_embeddings"] = case.original
    if case.family in PARTIAL:
        scaling["partial_rotary_factor"] = 0.5
    return {"rope_scaling": scaling, "rope_theta": 10000.0, "max_position_embeddings": case.original}


def positions_of(case: Case) -> int:
    """Return the number of tokens that a case's model supports.

    A sliding window of all original positions limits the stretched positions.
    """
    if case.rope != "qwen-yarn":
        return case.positions or POSITIONS
    stretched, window = STRETCH * case.original, getattr(config_of(case), "sliding_window", None) or 0
    return min(stretched, window) if window >= case.original else stretched


def config_of(case: Case) -> Any:
    """Return the config of a case's model."""
    heads = case.kv_heads * case.group
    hidden = heads * case.head_dim if case.family in OWN_HEAD_DIM else 64 + (-64 % lcm(heads, 8))
    changes: dict[str, Any] = {
        "num_hidden_layers": case.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": case.kv_heads,
        "hidden_size": hidden,
        "tie_word_embeddings": case.tied,
        "max_position_embeddings": case.positions or POSITIONS,
        "initializer_range": 0.2 if hidden <= 64 else 0.2 * (64 / hidden) ** 0.5,
    }
    if case.family not in OWN_HEAD_DIM:
        changes["head_dim"] = case.head_dim
    if case.rope == "qwen-yarn":
        changes |= qwen_yarn(case)
    elif case.family not in BY_LAYER_TYPE:
        changes["rope_parameters"] = rope_parameters(case)
    if case.rope == "longrope" and case.family in ("phi3", "phimoe"):
        changes["original_max_position_embeddings"] = case.original
    config = AutoConfig.for_model(case.family, **(COMMON | changes | FAMILIES[case.family](case)))
    if case.loud:
        for name in BIASES:
            if hasattr(config, name):
                setattr(config, name, True)
    return config


BIASES = ("attention_bias", "use_qkv_bias", "use_bias")
"""Config options for biases of the projections to queries and keys; some families always have biases, some never."""


def make_loud(model: PreTrainedModel, case: Case) -> None:
    """Make logits hundreds of nats apart, by biases of queries and keys as in Qwen2, which RoPE rotates.

    If there are norms of queries and keys instead, their weights are increased; if there are neither, the projections'
    weights are.
    """
    modules = {name: module for name, module in model.named_modules() if "attn" in name}
    kinds = {name.rpartition(".")[2] for name in modules}
    for name, module in modules.items():
        kind = name.rpartition(".")[2]
        if kind in ("q_norm", "k_norm", "q_layernorm", "k_layernorm") and hasattr(module, "weight"):
            module.weight.add_(case.loud**0.5)
        elif kind in ("q_proj", "k_proj") and module.bias is not None:
            module.bias.add_(case.loud * torch.randn_like(module.bias))
        elif kind in ("q_proj", "k_proj") and not kinds & {"q_norm", "q_layernorm"}:
            module.weight.mul_((1 + case.loud) ** 0.5)
        elif kind == "q_b_proj":  # the queries' projection in latent attention
            module.weight.mul_(1 + case.loud)
        elif kind == "qkv_proj":
            module.weight[: -case.kv_heads * case.head_dim].mul_((1 + case.loud) ** 0.5)


MODEL_FIELDS = ("family", "layers", "kv_heads", "group", "head_dim", "rope", "original", "positions", "window",
                "softcap", "tied", "weights", "loud", "ends", "eos")  # fmt: skip
"""The fields of a case that determine its model."""


def model_of(case: Case, device: str) -> PreTrainedModel:
    """Return a case's model in float32: random weights with peaked attention, and norms and biases that are not
    trivial."""
    key = tuple(getattr(case, name) for name in MODEL_FIELDS)
    return _made(key, device)


@lru_cache(maxsize=8)
def _made(key: tuple[Any, ...], device: str) -> PreTrainedModel:
    case = Case(**dict(zip(MODEL_FIELDS, key, strict=True)))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(case.weights)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(case), dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter) + (3.0 if name.endswith("sinks") else 0.0))
        if case.loud:
            make_loud(model, case)
        if case.ends:  # makes tokens that end an answer often the likeliest
            model.get_output_embeddings().weight[[*{END, *case.eos}]] *= 4.0
        model.generation_config.eos_token_id = case.eos[0] if len(case.eos) == 1 else list(case.eos)
    return model.to(device)


TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "bos": "{{ '<|start|>' }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}",
    # Llama 2's: the template has the token that ends an answer, and each question begins anew
    "inst": "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|start|>[INST] ' + "
    "message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + ' <|end|>' }}{% endif %}{% endfor %}",
    "trims": "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
    # No token ends a message; it ends where the next message begins.
    "open": "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
}
"""Chat templates by name."""


@lru_cache(maxsize=16)
def tokenizer_of(kind: str, template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte, or for each letter.

    The kind `begins` adds a token before each text. The kind `letters` has a sign for spaces, which is also before the
    first word.
    """
    tokenizer = tiny_tokenizer(TEMPLATES[template])
    if kind == "begins":
        beginning = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", START)])
        tokenizer.backend_tokenizer.post_processor = beginning
    if kind != "letters":
        return tokenizer
    letters = [chr(code) for code in range(33, 127)] + [SPACE_SIGN, "\n"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for place, letter in enumerate(letters):
        del vocabulary[f"<0x{place:02X}>"]
        vocabulary[letter] = place
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first", split=False), pre_tokenizers.Split(Regex("."), "isolated")]
    )
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE_SIGN, " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(list(tokenizer.get_added_vocab()))
    assert tuple(backend.token_to_id(one) for one in ("<|pad|>", "<|start|>", "<|end|>")) == (PAD, START, END)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        bos_token="<|start|>",
        eos_token="<|end|>",
        chat_template=TEMPLATES[template],
        clean_up_tokenization_spaces=False,
    )
