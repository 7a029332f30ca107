"""Models that attend in a way that no index can follow: told before hours are spent."""

from pathlib import Path

import pytest
import torch
from support.small_index import small_plan
from support.tiny_models import VOCABULARY, tiny_tokenizer
from transformers import BloomConfig, BloomForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.schema import MANIFEST
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
    [(without_attention, "1 layers of the model do not attend through"), (deepseek, "have different sizes")],
)
def test_they_are_refused_at_the_first_chunk(make: object, told: str, tmp_path: Path) -> None:
    assert callable(make)
    torch.manual_seed(0)
    loaded = LoadedModel(make().eval(), tiny_tokenizer(), "tiny-other", None)
    with pytest.raises(SparsekvError, match=told):
        build_index(small_plan(loaded=loaded, methods={}), tmp_path / "a.skv")
    assert not (tmp_path / "a.skv" / MANIFEST).exists()


def test_layers_of_another_kind_are_named() -> None:
    plan = small_plan()
    plan.loaded.model.config.layer_types = ["full_attention", "chunked_attention", "conv"]
    with pytest.raises(UsageError, match="tiny-llama has layers of chunked_attention, conv; an index is of"):
        small_plan(loaded=plan.loaded)


def test_a_model_without_kv_heads_is_named() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(UsageError, match=r"tiny-bloom \(bloom\) has no KV heads in its config"):
        small_plan(loaded=LoadedModel(model.eval(), tiny_tokenizer(), "tiny-bloom", None))
