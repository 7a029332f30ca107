"""Sizes, methods and shapes of `bench` and `bench-model`, for which `--help` need not wait for transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sparsekv.formats.index.schema import KVDtype

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LAYER_METHODS = ("codes", "squeezed", "multipole", "quest", "window")
MODEL_METHODS = ["multipole"]
"""Default methods of `bench`, and those of `bench-model`."""


@dataclass(frozen=True)
class Wanted:
    """Sizes of layers that the user has set. The default of a None or empty size depends on the device or the index.

    Attributes:
        contexts: numbers of tokens of a context, such as `32K`.
        batches: numbers of contexts, or with `shared` of questions.
        shared: a batch consists of several questions over one context, not of several contexts.
        kv_dtype: storage dtype of keys and values; None: `dtype`.
    """

    contexts: list[str]
    batches: list[int]
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    dtype: str
    seed: int
    shared: bool = False
    kv_dtype: KVDtype | None = None


def _config(kind: str, **sizes: Any) -> "PreTrainedConfig":
    """Make a config of a class of transformers, which is imported here, because that takes seconds."""
    import transformers

    config: PreTrainedConfig = getattr(transformers, kind)(**sizes)
    return config


CONFIGS: dict[str, Callable[[], "PreTrainedConfig"]] = {
    "qwen3-8b": partial(
        _config,
        "Qwen3Config",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    ),
    "llama-3.1-8b": partial(
        _config,
        "LlamaConfig",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "smollm2-135m": partial(
        _config,
        "LlamaConfig",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
}
"""Model configs by name. They have only the fields that determine a step's time, so RoPE's parameters are left out."""
