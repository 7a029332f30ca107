"""A number or activation in a config that changes keys or values changes the identity: rows of the other model are not
kept then."""

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from support.causal_families import CHANNELS, families, tiny_config, tiny_model
from support.small_index import random_ids
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from sparsekv.formats.index.identity import identify_model

from .test_families import TABLE

SOME = (
    "cohere",
    "gemma2",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "jetmoe",
    "olmo",
    "qwen3_moe",
    "starcoder2",
)
"""Families with multipliers, several norms, experts and clipped rows."""
NO_NUMBERS = ("output_attentions", "tie_word_embeddings")
"""Config fields outside the numbers of an identity: what a model returns, and tied weights, which the weights show."""


def rows(model: PreTrainedModel) -> list[torch.Tensor]:
    """Keys and values of all layers for some tokens."""
    cache = DynamicCache(config=model.config)  # whose layers with a state keep that
    with torch.inference_mode():
        model(input_ids=random_ids(24)[None], past_key_values=cache, use_cache=True)
    return [
        rows
        for layer in cache.layers
        for name in ("keys", "values")
        if (rows := getattr(layer, name, None)) is not None
    ]


def changed(config: PreTrainedConfig) -> Iterator[tuple[str, PreTrainedConfig]]:
    """The config with one of its numbers or activations changed, or the numbers of one of its lists, by the name."""
    for name, value in config.get_text_config().to_dict().items():
        numbers = list(value) if isinstance(value, list | tuple) else [value]
        known = numbers and all(isinstance(one, bool | int | float) for one in numbers)
        if known and not name.endswith("token_id") and name not in NO_NUMBERS:
            new = [_another(one) for one in numbers]
            yield name, _with(config, name, new if isinstance(value, list | tuple) else new[0])
        elif isinstance(value, str) and value in ACT2FN:
            yield name, _with(config, name, "relu" if value == "silu" else "silu")
        elif name in ("attn_config", "ffn_config"):  # DBRX's
            nested = getattr(config, name)
            for other_name, other in changed(nested):
                yield f"{name}.{other_name}", _with(config, name, other)


def given(config: PreTrainedConfig) -> Iterator[tuple[str, PreTrainedConfig]]:
    """The config with a number or a kind of position for one of its fields without a value, by the name."""
    for name, value in config.get_text_config().to_dict().items():
        for other in (0.1, "rope") if value is None and not name.endswith("token_id") else ():
            with suppress(StrictDataclassError):  # the field takes no such value
                yield name, _with(config, name, other)


def _with(config: PreTrainedConfig, name: str, value: Any) -> PreTrainedConfig:
    other = copy.deepcopy(config)
    setattr(other.get_text_config(), name, value)
    return other


def _another(value: float) -> float:
    return not value if isinstance(value, bool) else value * 1.5 + 0.1 if isinstance(value, float) else value + 1


def identity(config: PreTrainedConfig) -> str:
    return identify_model("tiny", None, config.get_text_config().to_dict(), "weights", None).config_hash


def _check(family: str, **changes: Any) -> None:
    try:
        config = tiny_config(family, **changes)
        model = tiny_model(config)
    except Exception:  # an older transformers makes no tiny model of the family: the sweep tells it
        return
    before, missed = rows(model), []
    for name, other in [*changed(config), *given(config)]:
        try:
            again = AutoModelForCausalLM.from_config(other, dtype=torch.float32).eval()
            again.load_state_dict(model.state_dict())
            after = rows(again)
        except Exception:  # other weights, which have an identity of their own, or a config that is none
            continue
        same = len(after) == len(before) and all(map(torch.equal, after, before))
        if not same and identity(other) == identity(config):
            missed.append(name)
    assert missed == []


@pytest.mark.parametrize("family", [name for name in SOME if name in families()])
def test_what_changes_rows_changes_the_identity(family: str) -> None:
    _check(family)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": None},
        {"rope_type": "longrope", "short_factor": [1.5] * (CHANNELS // 2), "long_factor": [2.0] * (CHANNELS // 2)},
    ],
    ids=["yarn", "longrope"],
)
def test_positions_that_give_rope_its_factor_change_the_identity(rope: dict[str, Any]) -> None:
    _check("llama", rope_parameters={"rope_theta": 1e4, "original_max_position_embeddings": 16, **rope})


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}),
        ("falcon_h1", {"mamba_rms_norm": True}),
    ],
)
def test_what_changes_rows_with_a_setting_alone_changes_the_identity(family: str, changes: dict[str, Any]) -> None:
    _check(family, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [name for name, right in TABLE.items() if right.strip() and name in families() and name not in SOME]
)
def test_what_changes_rows_changes_the_identity_of_every_family(family: str) -> None:
    _check(family)
