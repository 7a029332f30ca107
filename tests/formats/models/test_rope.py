"""Stretching positions by the config: it takes effect in a loaded model, and refuses what it cannot do."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.causal_families import tiny_config
from support.reference import assert_close
from support.tiny_models import FAMILIES, POSITIONS, save_tiny
from transformers import DynamicCache, GPT2Config, LlamaConfig, MistralConfig, PhimoeConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from sparsekv.formats.errors import UsageError
from sparsekv.formats.models.load import load_model
from sparsekv.formats.models.rope import RopeScaling, positions_after, positions_of, stretchable


def frequencies(folder: Path, scaling: str | None, buffer: str = "inv_freq") -> torch.Tensor:
    """[D / 2] rotary frequencies of the model in a folder once loaded."""
    return load_model(str(folder), device="cpu", rope_scaling=scaling).model.get_buffer(f"model.rotary_emb.{buffer}")


def test_yarn_slows_the_low_frequencies_and_keeps_the_high_ones(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    loaded = load_model(str(folder), device="cpu", rope_scaling="yarn:4")
    stretched, plain = loaded.model.get_buffer("model.rotary_emb.inv_freq"), frequencies(folder, None)
    turns = POSITIONS * plain / (2 * math.pi)
    assert_close(stretched[turns > 64], plain[turns > 64], 1e-6)
    assert_close(stretched[turns < 0.5], plain[turns < 0.5] / 4, 1e-6)
    assert (turns > 64).any()
    assert (turns < 0.5).any()
    assert loaded.model.config.max_position_embeddings == 4 * POSITIONS
    assert loaded.model.config.rope_parameters["original_max_position_embeddings"] == POSITIONS
    assert loaded.model.model.rotary_emb.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(("family", "rotary"), [("llama", LlamaRotaryEmbedding), ("phi3", Phi3RotaryEmbedding)])
def test_dynamic_is_the_ntk_scaling_of_the_stretched_length(
    tmp_path: Path, family: str, rotary: Callable[[PreTrainedConfig], torch.nn.Module]
) -> None:
    config = FAMILIES[family]().config
    config.rope_parameters = config.rope_parameters | {"rope_type": "dynamic", "factor": 2.5}
    reference = rotary(config)
    reference(torch.zeros(1), torch.tensor([[int(2.5 * POSITIONS) - 1]]))
    assert_close(frequencies(save_tiny(tmp_path, family), "dynamic:2.5"), reference.get_buffer("inv_freq"), 1e-6)


def test_dynamic_gives_chunks_the_positions_that_the_whole_has(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    model = load_model(str(folder), device="cpu", rope_scaling="dynamic:4").model
    ids = torch.randint(256, (1, 100), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache()
    with torch.inference_mode():
        whole = model(input_ids=ids).logits
        chunks = [model(input_ids=chunk, past_key_values=cache).logits for chunk in ids.split(23, dim=1)]
    assert_close(torch.cat(chunks, 1), whole, 1e-5)


def test_gemma3_is_stretched_where_attention_is_full(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "gemma3")
    for scaling in ("yarn:2", "dynamic:2"):
        assert torch.equal(
            frequencies(folder, scaling, "sliding_attention_inv_freq"),
            frequencies(folder, None, "sliding_attention_inv_freq"),
        )
        stretched = frequencies(folder, scaling, "full_attention_inv_freq")
        assert stretched[-1] < 0.6 * frequencies(folder, None, "full_attention_inv_freq")[-1]


def test_a_model_whose_config_leaves_out_the_size_of_a_head_is_stretched() -> None:
    config, plain = tiny_config("mixtral"), MixtralRotaryEmbedding(tiny_config("mixtral"))
    assert config.head_dim is None
    RopeScaling.parse("yarn:4").stretch(config)
    assert_close(MixtralRotaryEmbedding(config).inv_freq[-1], plain.inv_freq[-1] / 4, 1e-6)


def test_layers_with_a_theta_of_their_own_are_stretched() -> None:
    """But not those without RoPE."""
    config = tiny_config("granite_swa")
    config.layer_rope_theta[0] = 0.0
    RopeScaling.parse("dynamic:4").stretch(config)
    assert config.rope_parameters["rope_theta"] > 10_000
    assert config.layer_rope_theta == [0.0, *[config.rope_parameters["rope_theta"]] * 3]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(), "gpt2 model has no rotary positions"),
        (tiny_config("granitemoehybrid"), "granitemoehybrid model has no rotary positions"),
        (tiny_config("zamba2"), "zamba2 model has no rotary positions"),
        (FAMILIES["gpt-oss"]().config, "scaled already .yarn"),
    ],
)
def test_positions_that_cannot_be_stretched_are_refused(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(UsageError, match=f"{reason}.*; leave the option out, or give --model the index's own"):
        RopeScaling.parse("yarn:2").stretch(config)


@given(factor=st.floats(min_value=1, exclude_min=True, max_value=1000), kind=st.sampled_from(["yarn", "dynamic"]))
def test_a_kind_and_a_factor_above_one_are_read(factor: float, kind: str) -> None:
    assert RopeScaling.parse(f"{kind}:{factor!r}") == RopeScaling(kind, factor)


@pytest.mark.parametrize("text", ["", "yarn", "yarn:", "yarn:1", "yarn:0.5", "dynamic:inf", "yarn:1001", "linear:2"])
def test_anything_else_is_refused_with_the_form_to_use(text: str) -> None:
    with pytest.raises(UsageError) as error:
        RopeScaling.parse(text)
    assert str(error.value) == (
        f"--rope-scaling {text}: give yarn:FACTOR or dynamic:FACTOR with a factor above 1 and at most 1,000"
    )


def stretched(kind: str, **more: object) -> PreTrainedConfig:
    """A config whose 100 positions are the original ones, as Qwen's recipe for YaRN leaves them."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 100, **more}
    return LlamaConfig(max_position_embeddings=100, rope_parameters=rope)


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (stretched("yarn"), 400),
        (stretched("linear"), 400),
        (stretched("llama3", low_freq_factor=1.0, high_freq_factor=4.0), 100),
        (stretched("dynamic"), 100),
        (stretched("yarn", original_max_position_embeddings=20), 100),
        (FAMILIES["gpt-oss"]().config, POSITIONS),
        (FAMILIES["llama"]().config, POSITIONS),
        (GPT2Config(n_positions=77), 77),
    ],
)
def test_a_model_holds_its_original_positions_times_the_factor(config: PreTrainedConfig, positions: int) -> None:
    assert positions_of(config) == positions
    assert positions_after(config, 10) == positions


@pytest.mark.parametrize(("window", "positions"), [(None, 400), (99, 400), (100, 100), (150, 150), (500, 400)])
def test_a_window_of_all_original_positions_limits_the_stretched_ones(window: int | None, positions: int) -> None:
    config = MistralConfig(**stretched("yarn").to_dict() | {"sliding_window": window})
    assert positions_of(config) == positions


def test_positions_that_are_scaled_already_are_not_to_be_stretched() -> None:
    assert stretchable(FAMILIES["llama"]().config)
    assert not stretchable(stretched("yarn"))
    assert not stretchable(GPT2Config())


def longrope(kind: type[PreTrainedConfig], **more: object) -> PreTrainedConfig:
    """A config whose positions change beyond 100 of its 400 tokens."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 100, **factors, **more}
    return kind(max_position_embeddings=400, hidden_size=64, num_attention_heads=4, rope_parameters=rope)


@pytest.mark.parametrize(
    "config",
    [longrope(LlamaConfig), longrope(PhimoeConfig, short_mscale=1.2, long_mscale=1.3)],
    ids=["llama", "phimoe"],
)
def test_a_sequence_stays_on_its_documents_side_of_longropes_switch(config: PreTrainedConfig) -> None:
    assert positions_of(config) == 400
    assert [positions_after(config, tokens) for tokens in (10, 100, 101, 300)] == [100, 100, 400, 400]
