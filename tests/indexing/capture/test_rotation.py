"""How layers rotate their keys, measured: it explains what a prefill stored, for every kind of rotary embedding."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.reference import assert_close, relative_error
from support.rotation import rotated
from support.small_index import small_plan, with_changes
from support.small_layer import small_layer
from support.tiny_models import FAMILIES, build_tiny
from transformers import (
    Cohere2Config,
    CohereConfig,
    GlmConfig,
    GPTNeoXConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
)

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import LayerFacts, RopeFacts
from sparsekv.indexing.build import build_index
from sparsekv.indexing.capture.capture import capture
from sparsekv.indexing.capture.rotation import measure_rotations
from sparsekv.indexing.indexers.interface import Indexer, LayerInput
from sparsekv.indexing.methods.csattention import CSAttentionIndexer
from sparsekv.indexing.methods.multipole import WindowedMultipoleIndexer

TOKENS, TRAINED_ON = 200, 64
DTYPES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def _scaled(rope_type: str, **parameters: float) -> Callable[[], PreTrainedModel]:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, **parameters}
    return build_tiny(LlamaConfig, rope_parameters=rope, max_position_embeddings=TRAINED_ON)


PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **FAMILIES,
    "glm": build_tiny(GlmConfig, head_dim=16, rope_parameters=PARTIAL),
    "gpt-neox": build_tiny(GPTNeoXConfig, rope_parameters=PARTIAL),
    "cohere": build_tiny(CohereConfig),
    "cohere2": build_tiny(Cohere2Config, sliding_window=32, num_hidden_layers=4),
    "linear": _scaled("linear"),
    "dynamic": _scaled("dynamic"),
    "yarn": _scaled("yarn", original_max_position_embeddings=TRAINED_ON),
    "llama3": _scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=TRAINED_ON),
    "longrope": build_tiny(
        Phi3Config,
        sliding_window=None,
        original_max_position_embeddings=TRAINED_ON,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0 + number for number in range(8)],
            "original_max_position_embeddings": TRAINED_ON,
        },
    ),
}
PAIRS = {"phi3": 4, "glm": 4, "gpt-neox": 4, "qwen3": 16}
INTERLEAVED = {"glm", "cohere", "cohere2"}
WITHOUT = {"smollm3": [1, 3], "cohere2": [3]}


def _ids(tokens: int) -> torch.Tensor:
    """One token over and over: whatever attends to it gives the same, so only rotation tells its keys apart."""
    return torch.full((tokens,), 77)


def _prefilled(model: PreTrainedModel, tokens: int = TOKENS) -> list[torch.Tensor]:
    """Keys [Hk, N, D] of each layer whose input is the same for every token."""
    captured = capture(model, _ids(tokens), tail=8)
    # A learned sink takes a share of the attention that shrinks with every token, so later layers see a difference.
    layers = 1 if captured.facts(0).attention_sinks else model.config.num_hidden_layers
    return [captured.take(layer).keys for layer in range(layers)]


@pytest.mark.parametrize("name", MODELS)
def test_prefilled_keys_are_those_of_the_first_position_turned_as_measured(name: str) -> None:
    model = MODELS[name]()
    layers = _prefilled(model)
    ropes = measure_rotations(model, _ids(TOKENS))
    assert len(ropes) == model.config.num_hidden_layers
    for number, rope in ropes.items():
        assert rope is not None
        turns = number not in WITHOUT.get(name, [])
        assert rope.interleaved == (turns and name in INTERLEAVED)
        assert len(rope.frequencies) == (PAIRS.get(name, 8) if turns else 0)
    for keys, rope in zip(layers, ropes.values(), strict=False):
        assert rope is not None
        assert_close(keys, rotated(keys[:, :1].expand_as(keys), torch.arange(TOKENS), rope), 1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "yarn", "glm", "gpt-oss"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_of_half_precision_hides_no_rotation(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]().to(dtype)
    for keys, rope in zip(_prefilled(model), measure_rotations(model, _ids(TOKENS)).values(), strict=False):
        assert rope is not None
        assert_close(keys, rotated(keys[:, :1].expand_as(keys), torch.arange(TOKENS), rope), DTYPES[dtype])


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_are_those_of_the_prompt(name: str) -> None:
    model = MODELS[name]()
    short, long, again = (measure_rotations(model, _ids(tokens))[0] for tokens in (TRAINED_ON, TOKENS, TRAINED_ON))
    assert short is not None
    assert long is not None
    assert short == again
    assert relative_error(torch.tensor(long.frequencies), torch.tensor(short.frequencies)) > 0.05
    assert relative_error(torch.tensor(short.frequencies), 10000.0 ** -(torch.arange(8) / 8)) < 1e-6


def test_layers_of_two_kinds_of_attention_turn_with_frequencies_of_their_own() -> None:
    sliding, full, *_ = measure_rotations(FAMILIES["gemma3"](), _ids(TOKENS)).values()
    assert sliding is not None
    assert full is not None
    assert full.frequencies[-1] < 0.1 * sliding.frequencies[-1]


def _of_another_kind(bias: float = 0.0) -> PreTrainedModel:
    """Every second position is the one before it; the last pair of key channels, which hardly turns, gets a bias."""
    model = build_tiny(Qwen2Config)()
    rotary, forward = model.model.rotary_emb, model.model.rotary_emb.forward
    rotary.forward = lambda rows, position_ids: forward(rows, position_ids // 2 * 2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[7::8] += bias
    return model


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [0.0, 1000.0])
def test_another_way_to_turn_is_not_known(dtype: torch.dtype, bias: float) -> None:
    """Large channels that hardly rotate make every distance between whole keys small."""
    assert measure_rotations(_of_another_kind(bias).to(dtype), _ids(TOKENS)) == dict.fromkeys(range(3))


def test_a_rotation_is_known_if_the_last_token_has_an_embedding_of_zeros() -> None:
    """A talk may end with the padding token, whose keys are zeros at each position."""
    model, ids = MODELS["linear"](), torch.arange(2, TOKENS)
    expected = measure_rotations(model, ids)
    model.get_input_embeddings().weight.data[0] = 0.0
    assert measure_rotations(model, torch.cat([ids, torch.zeros(1, dtype=torch.int64)])) == expected


def test_a_known_rotation_shows_behind_large_channels() -> None:
    model = _of_another_kind(1000.0)
    odd = measure_rotations(model, _ids(TOKENS + 1))
    assert [None if rope is None else len(rope.frequencies) for rope in odd.values()] == [8] * 3


def test_rotations_stand_in_the_manifest_and_stay_with_an_index(tmp_path: Path) -> None:
    plan = small_plan("smollm3")
    built = build_index(plan, tmp_path / "a.skv")
    expected = measure_rotations(plan.loaded.model, plan.prompt.input_ids)
    assert {layer: facts.rope for layer, facts in built.attending.items()} == expected
    assert RopeFacts(frequencies=[], interleaved=False) in expected.values()
    assert build_index(plan, tmp_path / "a.skv").layers == built.layers


@pytest.mark.parametrize(
    ("name", "indexer", "known", "message"),
    [
        (
            "multipole-windowed",
            WindowedMultipoleIndexer(),
            False,
            r"^--method multipole-windowed: .* does not rotate its keys by RoPE",
        ),
        (
            "csattention",
            CSAttentionIndexer(),
            False,
            "^--subspaces rope-pairs: how this model rotates its keys could not be determined",
        ),
        ("csattention", CSAttentionIndexer(subspace_size=1), True, "^--subspace-size 1 splits pairs of channels"),
    ],
)
def test_a_rotation_that_a_method_cannot_follow_is_refused_before_the_prefill(
    name: str, indexer: Indexer, known: bool, message: str, tmp_path: Path
) -> None:
    plan = small_plan(methods={name: indexer})
    if not known:
        plan = with_changes(plan, loaded=replace(plan.loaded, model=_of_another_kind()))
    stages = set[str]()
    with pytest.raises(UsageError, match=message):
        build_index(plan, tmp_path / "a.skv", lambda stage, done, of: stages.add(stage))
    assert not stages  # nothing was prefilled


def test_windowed_rope_of_an_index_that_does_not_know_its_rotations() -> None:
    """Rows of an earlier version, whose manifest has no rotations, are there for methods that are added."""
    layer = small_layer(block=64)
    facts = LayerFacts(softmax_scale=0.25, softcap=None, sliding_window=None, attention_sinks=False)
    rows = LayerInput(layer.keys[:, layer.middle], layer.values[:, layer.middle], facts, layer.split)
    with pytest.raises(UsageError, match=r"how each layer rotates its keys.*--force"):
        WindowedMultipoleIndexer().lookup_keys(rows, slice(0, 64))
