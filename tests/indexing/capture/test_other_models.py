"""Models that attend in a way that no index can follow: told before hours are spent."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.causal_families import tiny_config, tiny_model, variants
from support.small_index import small_plan
from support.tiny_models import tiny_tokenizer
from transformers import Cache, PreTrainedModel

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.build import build_index


class NoAttention(torch.nn.Module):
    """In the place of a layer's attention."""

    def forward(self, hidden_states: torch.Tensor, **more: object) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(hidden_states), None


def without_attention() -> PreTrainedModel:
    """Its second layer has none."""
    model = small_plan().loaded.model
    model.model.layers[1].self_attn = NoAttention()  # type: ignore[union-attr,operator,index]
    return model


class Counts(torch.nn.Module):
    """In the place of a layer's MLP: turns channels by how many tokens it has seen, a state that no cache holds."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.seen += hidden_states.shape[1]
        return 3 * hidden_states.roll(self.seen, -1)


def with_a_state() -> PreTrainedModel:
    model = small_plan().loaded.model
    model.model.layers[1].mlp = Counts()  # type: ignore[union-attr,operator,index]
    return model


class Reads:
    """In the place of a cache: returns the rows that it has before the new ones, and keeps none of these."""

    def __init__(self, cache: Cache):
        self.cache = cache

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before: Any = self.cache.layers[layer]
        if not before.is_initialized:
            return keys, values
        return torch.cat([before.keys, keys], 2), torch.cat([before.values, values], 2)


class Loops(torch.nn.Module):
    """A layer's attention that runs twice, of which the second run alone writes to the cache."""

    def __init__(self, attention: torch.nn.Module):
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: torch.Tensor, **more: Any) -> Any:
        caches = {name: Reads(more[name]) for name in ("past_key_values", "cache") if more.get(name) is not None}
        first, _ = self.attention(hidden_states=hidden_states, **more | caches)
        return self.attention(hidden_states=hidden_states + first, **more)


def with_a_loop() -> PreTrainedModel:
    model = small_plan().loaded.model
    layer: Any = model.model.layers[1]  # type: ignore[union-attr,operator,index]
    layer.self_attn = Loops(layer.self_attn)
    return model


def of_family(family: str, **changes: Any) -> PreTrainedModel:
    return tiny_model(tiny_config(family, **changes))


SHARED = variants("gemma4_text")["shared"]
"""Layers that share keys and values, and of which transformers runs the last ones for the tokens with logits alone."""

TWICE = "attend several times for each token"
LOOPS = [
    pytest.param(partial(of_family, "dory", recurrent_kv_cache_mode=mode), TWICE, id=f"dory {mode}")
    for mode in ("per_loop", "last_loop")
]
OF_LATER_TRANSFORMERS = [
    pytest.param(
        partial(of_family, "gemma4_text", **SHARED), "layer 2 skips tokens whose logits are not needed", id="skipping"
    ),
    pytest.param(partial(of_family, "gemma4_unified_assistant"), "does not run on token ids alone", id="drafter"),
]
"""Transformers 5.17 runs all tokens through the first model, and has no config of the second."""


@pytest.mark.parametrize(
    ("make", "told"),
    [
        pytest.param(without_attention, "1 layers of the model do not attend through", id="no attention"),
        pytest.param(partial(of_family, "diffllama"), TWICE, id="diffllama"),
        pytest.param(partial(of_family, "mimo_v2_flash"), "its layers differ in size", id="sizes"),
        pytest.param(partial(of_family, "ministral"), "every layer of tiny-other has a sliding window", id="windows"),
        pytest.param(with_a_state, "its logits .* differ by .* from the logits of a plain run", id="state"),
        pytest.param(with_a_loop, TWICE, id="loop"),
        *(OF_LATER_TRANSFORMERS if Version(transformers.__version__) >= Version("5.18") else []),
        *(LOOPS if Version(transformers.__version__) >= Version("5.24") else []),
    ],
)
def test_they_are_refused_before_the_prefill(make: object, told: str, tmp_path: Path) -> None:
    assert callable(make)
    torch.manual_seed(0)
    loaded, begun = LoadedModel(make().eval(), tiny_tokenizer(), "tiny-other", None), list[str]()
    with pytest.raises(SparsekvError, match=f"tiny-other cannot be indexed: .*({told}).*; choose another model"):
        build_index(
            small_plan(loaded=loaded, methods={}), tmp_path / "a.skv", lambda stage, done, of: begun.append(stage)
        )
    assert not begun
    assert not (tmp_path / "a.skv").exists()


def test_tokens_that_the_model_has_not_are_named_before_the_prefill(tmp_path: Path) -> None:
    plan = small_plan()
    plan.loaded.model.resize_token_embeddings(200)
    with pytest.raises(SparsekvError, match="has token id 257, and tiny-llama has 200 embeddings: the tokenizer"):
        build_index(plan, tmp_path / "a.skv")
    assert not (tmp_path / "a.skv").exists()


def test_heads_of_different_sizes_are_named() -> None:
    with pytest.raises(UsageError, match=r"tiny-other \(gemma4_text\) has layers with heads of different sizes"):
        small_plan(loaded=LoadedModel(of_family("gemma4_text"), tiny_tokenizer(), "tiny-other", None))


def test_layers_of_another_kind_are_named() -> None:
    plan = small_plan()
    plan.loaded.model.config.layer_types = ["full_attention", "chunked_attention", "conv"]
    with pytest.raises(UsageError, match="tiny-llama has layers of chunked_attention, which sparsekv does not support"):
        small_plan(loaded=plan.loaded)


@pytest.mark.parametrize("family", ["bloom", "mamba"])
def test_a_model_without_kv_heads_is_named(family: str) -> None:
    """Bloom gives them another name, and Mamba has no attention."""
    loaded = LoadedModel(of_family(family), tiny_tokenizer(), "tiny-other", None)
    with pytest.raises(
        UsageError, match=rf"tiny-other \({family}\) does not give its number of KV heads in its config"
    ):
        small_plan(loaded=loaded)


def test_the_decoder_of_an_encoder_decoder_model_is_named() -> None:
    loaded = LoadedModel(of_family("whisper"), tiny_tokenizer(), "tiny-other", None)
    with pytest.raises(UsageError, match=r"tiny-other \(whisper\) is an encoder-decoder model, and only"):
        small_plan(loaded=loaded)
