"""Model shapes for end-to-end benchmarks: a few by name, or any folder's config.json."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from sparsekv.formats.errors import UsageError
from sparsekv.formats.suggestions import choose_one

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-8b": lambda: Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    ),
    "llama-3.1-8b": lambda: LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "smollm2-135m": lambda: LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
}
"""Only the fields that determine a step's time; RoPE's parameters do not."""


def model_config(name: str) -> PreTrainedConfig:
    """A config by its name, or from a folder.

    Raises:
        UsageError: there is none, or its attention has sliding windows or a soft cap, which torch's dense attention
            lacks.
    """
    if name in CONFIGS:
        return CONFIGS[name]()
    if not (Path(name) / "config.json").is_file():
        raise UsageError(f"--config {name}: {choose_one(name, CONFIGS)}, or give a folder with a config.json")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name).get_text_config()
    except (ValueError, OSError) as error:
        raise UsageError(f"--config {name}: transformers cannot read its config.json: {error}") from None
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "attn_logit_softcapping", None):
        raise UsageError(
            f"--config {name}: its attention has windows or a soft cap, which the dense attention of torch that is "
            "compared with has not; choose another model"
        )
    return config


def head_dim(config: PreTrainedConfig) -> int:
    """Channels per head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def random_model(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """A model with random weights, created on the device; allocates the weights once."""
    torch.manual_seed(seed)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval()
    return model


@torch.no_grad()
def make_queries_alike(model: PreTrainedModel, share: float) -> bool:
    """Give the queries of all tokens a part in common, `share` of their norm, as those of a trained model have it.

    It is a bias of the layers' `q_proj`, before RoPE; False: there are none. With random weights alone the queries of
    several questions over one context have nothing in common, nor has what they choose.
    """
    projections = [module for name, module in model.named_modules() if name.endswith("q_proj")]
    for module in projections:
        assert isinstance(module, torch.nn.Linear)
        own = float(module.weight.std()) * math.sqrt(module.in_features)  # of inputs of unit variance
        common = torch.randn(module.out_features, dtype=module.weight.dtype, device=module.weight.device)
        module.bias = torch.nn.Parameter(common * own * share / math.sqrt(1 - share**2))
    return bool(projections)
