"""Tiny random models of every supported family, and a tokenizer for them."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

SPECIAL_TOKENS = ("<|pad|>", "<|start|>", "<|end|>", "<|unused|>")
PAD, START, END, UNUSED = 256, 257, 258, 259
VOCABULARY = 256 + len(SPECIAL_TOKENS)
POSITIONS = 4096
WINDOW = 32

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    # ten times the usual value, so that a random model's attention is far from uniform
    "initializer_range": 0.2,
    "pad_token_id": PAD,
    "bos_token_id": START,
    "eos_token_id": END,
}


def build_tiny(kind: type[PreTrainedConfig], **changes: Any) -> Callable[[], PreTrainedModel]:
    """Return a function that builds a model from a config class, with the common fields and some changes.

    Each call of the function returns another copy of one model, because new random weights take twice as long as a
    copy.
    """

    @cache
    def build() -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                kind(**(COMMON | changes)), dtype=torch.float32
            ).eval()
            for name, parameter in model.named_parameters():
                # Norms, biases and sinks are ones or zeros at first. Then no test would notice their absence.
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter) + (3.0 if name.endswith("sinks") else 0.0))
        return model

    return lambda: deepcopy(build())


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": build_tiny(LlamaConfig),
    "qwen2": build_tiny(
        Qwen2Config, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2, num_hidden_layers=4
    ),
    "qwen3": build_tiny(Qwen3Config, head_dim=32),
    "mistral": build_tiny(MistralConfig, sliding_window=WINDOW),
    "smollm3": build_tiny(SmolLM3Config, no_rope_layer_interval=2, num_hidden_layers=4),
    "phi3": build_tiny(
        Phi3Config,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    # a soft cap and a scale that are far from the defaults, so that leaving either out shows
    "gemma2": build_tiny(
        Gemma2Config,
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=9,
        attn_logit_softcapping=3.0,
        num_hidden_layers=4,
    ),
    "gemma3": build_tiny(
        Gemma3TextConfig,
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=9,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_hidden_layers=4,
    ),
    "gpt-oss": build_tiny(
        GptOssConfig,
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=4,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": POSITIONS // 4,
        },
    ),
}
"""Functions that build each family's model in float32, with the same random weights each time, 64 channels wide."""
DIFFERENT = ("llama", "gemma2", "gpt-oss")
"""Families with plain attention; with a soft cap and a window; and with learned sinks, a window and experts."""
FAMILIES_OF_STEPS = [
    pytest.param(name, marks=() if name in DIFFERENT else pytest.mark.slow, id=name) for name in FAMILIES
]
"""Families for tests of decode steps, of which there are hundreds per family. A build's tests run for every family."""


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte, which keeps any text unchanged, and four special tokens."""
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    pad, start, end, _ = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        bos_token=start,
        eos_token=end,
        chat_template=chat_template,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def save_tiny(folder: Path, family: str = "llama") -> Path:
    """Write a family's model and the tokenizer to a folder that `from_pretrained` loads; return the folder."""
    FAMILIES[family]().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
