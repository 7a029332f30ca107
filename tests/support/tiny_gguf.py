"""GGUF files of tiny random models, with a byte-level tokenizer, as llama.cpp's converter writes them."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel, Qwen2Config

from support.tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS, build_tiny

TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "he", "12", *SPECIAL_TOKENS]
MERGES = ["t h", "h e", "1 2"]
SCORES = {"th": -1.0, "he": -2.0, "\u2581th": -3.0, "the": -4.0, "\u2581the": -5.0, "\u2581\u2581": -6.0}
"""Scores of SentencePiece's tokens of several letters, best first."""
PIECES = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SCORES, *"\u2581then", *SPECIAL_TOKENS]
PAD, START, END, _ = range(len(TOKENS) - len(SPECIAL_TOKENS), len(TOKENS))
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tiny_qwen2(tokens: list[str] = TOKENS) -> PreTrainedModel:
    end = tokens.index(SPECIAL_TOKENS[2])
    return build_tiny(Qwen2Config, vocab_size=len(tokens), bos_token_id=START, eos_token_id=end, pad_token_id=PAD)()


SENTENCEPIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": PIECES.index(SPECIAL_TOKENS[2]),
    "tokenizer.ggml.padding_token_id": PIECES.index(SPECIAL_TOKENS[0]),
}
"""Keys of a file with a SentencePiece tokenizer."""


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    pre: str = "qwen2",
    without: str = "",
    more: Mapping[str, np.ndarray] = MappingProxyType({}),
    **changes: Any,
) -> Path:
    """Write a GGUF file of a Qwen 2 model's weights, with int8 matrices (Q8_0).

    `changes` are further keys with their values, or None to leave a key out. If `tokenizer.ggml.model` is `llama`, the
    vocabulary is PIECES, otherwise TOKENS. The weight `without` is left out, and the tensors of `more` are added.
    """
    config = model.config
    keys: dict[str, Any] = {
        "qwen2.block_count": config.num_hidden_layers,
        "qwen2.context_length": config.max_position_embeddings,
        "qwen2.embedding_length": config.hidden_size,
        "qwen2.feed_forward_length": config.intermediate_size,
        "qwen2.attention.head_count": config.num_attention_heads,
        "qwen2.attention.head_count_kv": config.num_key_value_heads,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.bos_token_id": START,
        "tokenizer.ggml.padding_token_id": PAD,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.chat_template": CHAT_TEMPLATE,
        "qwen2.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "qwen2.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    } | changes
    writer = GGUFWriter(path, "qwen2")
    for name, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            writer.add_string(name, value)
    if keys["tokenizer.ggml.model"] == "llama":
        bytes_ = [6] * 256
        writer.add_token_list(PIECES)
        writer.add_token_types(
            [2, 3, *bytes_, *[1] * (len(PIECES) - 258 - len(SPECIAL_TOKENS)), *[3] * len(SPECIAL_TOKENS)]
        )
        writer.add_token_scores([SCORES.get(piece, -100.0) for piece in PIECES])
    else:
        writer.add_token_list(TOKENS)
        writer.add_token_types([1] * (len(TOKENS) - len(SPECIAL_TOKENS)) + [3] * len(SPECIAL_TOKENS))
        writer.add_token_merges(MERGES)
    for name, tensor in model.state_dict().items():
        if name != without:
            _add(writer, name, tensor.float().numpy())
    for name, rows in more.items():
        writer.add_tensor(name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, name: str, rows: np.ndarray) -> None:
    module, _, kind = name.rpartition(".")
    if module in WHOLE:
        named = WHOLE[module]
    else:
        _, _, layer, inner = module.split(".", 3)
        named = f"blk.{layer}.{NAMES[inner]}"
    eight = GGMLQuantizationType.Q8_0
    if rows.ndim == 2:
        writer.add_tensor(f"{named}.{kind}", quants.quantize(rows, eight), raw_dtype=eight)
    else:
        writer.add_tensor(f"{named}.{kind}", rows)


def torch_equal(ours: PreTrainedModel, others: PreTrainedModel) -> bool:
    """Whether two models have the same weights, bit for bit."""
    found, expected = ours.state_dict(), others.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
