"""A model whose attention is routed to our dense causal attention returns its own logits."""

import pytest
import torch
from support.reference import assert_close
from support.tiny_models import FAMILIES, VOCABULARY, WINDOW
from transformers import PreTrainedModel

from sparsekv.kernels.attention.attention import causal_attention
from sparsekv.kernels.common.hook import AttentionCall, route_attention

TOKENS = 3 * WINDOW
LAYERS = {
    "llama": [None] * 3,
    "qwen2": [None, None, WINDOW, WINDOW],
    "qwen3": [None] * 3,
    "mistral": [WINDOW] * 3,
    "smollm3": [None] * 4,
    "phi3": [None] * 3,
    "gemma2": [WINDOW, None] * 2,
    "gemma3": [WINDOW, None] * 2,
    "gpt-oss": [WINDOW, None] * 2,
}


def input_ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def dense(call: AttentionCall) -> torch.Tensor:
    return causal_attention(
        call.query, call.keys, call.values, call.softmax_scale, call.softcap, call.window, call.sink_logits
    )


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids()).logits
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_attention_of_ours_is_the_models_own(family: str) -> None:
    model = FAMILIES[family]()
    # Some releases leave out the soft cap in gemma-2's faster attention.
    model.set_attn_implementation("eager")
    own = logits(model)
    with route_attention(model, dense):
        routed = logits(model)
    assert_close(routed, own.double(), 1e-5)
    assert torch.equal(logits(model), own)


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_tell_how_each_layer_attends(family: str) -> None:
    model, calls = FAMILIES[family](), []

    def record(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return dense(call)

    with route_attention(model, record):
        logits(model)
    config = model.config
    D = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert [call.layer for call in calls] == list(range(config.num_hidden_layers))
    assert [call.window for call in calls] == LAYERS[family]
    for layer, call in enumerate(calls):
        assert call.query.shape == (config.num_attention_heads, TOKENS, D)
        assert call.keys.shape == call.values.shape == (config.num_key_value_heads, TOKENS, D)
        scale = config.query_pre_attn_scalar if family.startswith("gemma") else D
        assert call.softmax_scale == pytest.approx(scale**-0.5)
        assert call.softcap == (3.0 if family == "gemma2" else None)
        if family == "gpt-oss":
            assert call.sink_logits is model.get_submodule(f"model.layers.{layer}.self_attn").sinks
        else:
            assert call.sink_logits is None


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_previous_attention_is_back_afterwards(implementation: str) -> None:
    model = FAMILIES["llama"]()
    model.set_attn_implementation(implementation)
    with route_attention(model, dense):
        assert model.config._attn_implementation != implementation
    assert model.config._attn_implementation == implementation


def test_the_previous_attention_is_back_after_an_exception() -> None:
    model = FAMILIES["llama"]()
    implementation, own = model.config._attn_implementation, logits(model)

    def fail(call: AttentionCall) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), route_attention(model, fail):
        logits(model)
    assert model.config._attn_implementation == implementation
    assert torch.equal(logits(model), own)


def test_routes_nest() -> None:
    model = FAMILIES["llama"]()

    def nothing(call: AttentionCall) -> torch.Tensor:
        return torch.zeros_like(call.query)

    with route_attention(model, dense):
        own = logits(model)
        with route_attention(model, nothing):
            assert not torch.equal(logits(model), own)
        assert torch.equal(logits(model), own)
