"""Models that attend in a way that no index can follow: told before hours are spent."""

from functools import partial
from pathlib import Path

import pytest
import torch
from support.causal_families import tiny_config, tiny_model
from support.small_index import small_plan
from support.tiny_models import VOCABULARY, tiny_tokenizer
from transformers import BloomConfig, BloomForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.index.schema import MANIFEST
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


def of_family(family: str, **changes: int) -> PreTrainedModel:
    return tiny_model(tiny_config(family, **changes))


def deepseek() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
    parts = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 2,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=VOCABULARY, **sizes, **heads, **parts, **experts))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (without_attention, "1 layers of the model do not attend through"),
        (deepseek, "have different sizes|not those in its cache"),
        (partial(of_family, "jetmoe"), "attends with keys .* that are not those in its cache"),
        (partial(of_family, "diffllama"), "attend several times to each token"),
        (partial(of_family, "deepseek_v3", v_head_dim=16, qk_nope_head_dim=8), "keys .* not those in its cache"),
        (partial(of_family, "gemma3n_text"), "layer 2 of the model has no keys and values of its own"),
        (partial(of_family, "mimo_v2_flash"), "its layers differ in size"),
        (partial(of_family, "ministral"), "every layer of tiny-other has a sliding window"),
        (partial(of_family, "gemma4_unified_assistant"), "does not run on token ids alone"),
        (with_a_state, "its logits are .* from its own"),
    ],
    ids=["no attention", "MLA", "jetmoe", "diffllama", "equal MLA", "shared", "sizes", "windows", "drafter", "state"],
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
    assert not (tmp_path / "a.skv" / MANIFEST).exists()


def test_tokens_that_the_model_has_not_are_named_before_the_prefill(tmp_path: Path) -> None:
    plan = small_plan()
    plan.loaded.model.resize_token_embeddings(200)
    with pytest.raises(SparsekvError, match="has token id 257, and tiny-llama has 200 embeddings: its tokenizer"):
        build_index(plan, tmp_path / "a.skv")


def test_heads_of_different_sizes_are_named() -> None:
    with pytest.raises(UsageError, match=r"tiny-other \(gemma4_text\) has layers with heads of different sizes"):
        small_plan(loaded=LoadedModel(of_family("gemma4_text"), tiny_tokenizer(), "tiny-other", None))


def test_layers_of_another_kind_are_named() -> None:
    plan = small_plan()
    plan.loaded.model.config.layer_types = ["full_attention", "chunked_attention", "conv"]
    with pytest.raises(UsageError, match="tiny-llama has layers of chunked_attention, which no index follows"):
        small_plan(loaded=plan.loaded)


def test_a_model_without_kv_heads_is_named() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(UsageError, match=r"tiny-bloom \(bloom\) has no KV heads in its config"):
        small_plan(loaded=LoadedModel(model.eval(), tiny_tokenizer(), "tiny-bloom", None))
