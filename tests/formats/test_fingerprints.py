"""Which changes of a model or tokenizer change its fingerprint, and which do not."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.random_tensors import normal
from support.tiny_models import FAMILIES
from torch.testing._internal.two_tensor import TwoTensor

from sparsekv.formats.index.identity import KV_FIELDS, fingerprint_weights, identify_model, identify_tokenizer
from sparsekv.formats.index.schema import ModelIdentity

State = dict[str, torch.Tensor]
CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "rope_parameters": {"rope_theta": 10000.0}}


def state(dtype: torch.dtype = torch.float32) -> State:
    return {"embed": normal(0, 50, 16).to(dtype), "norm": normal(1, 16).to(dtype), "bits": torch.arange(600)}


def identity(config: dict[str, Any] = CONFIG, adapter: str | None = None) -> ModelIdentity:
    return identify_model("some/model", "main", config, fingerprint_weights(state().items()), adapter)


def test_one_checkpoint_in_float32_and_in_bfloat16_agrees() -> None:
    model = FAMILIES["llama"]()
    full = fingerprint_weights(model.state_dict().items())
    assert fingerprint_weights(model.bfloat16().state_dict().items()) == full
    assert fingerprint_weights(model.float().state_dict().items()) == full


def test_the_order_and_the_layout_of_the_weights_do_not_matter() -> None:
    weights = state()
    backwards = {name: tensor.clone() for name, tensor in reversed(weights.items())}
    backwards["embed"] = weights["embed"].t().contiguous().t()
    assert fingerprint_weights(backwards.items()) == fingerprint_weights(weights.items())


@given(st.integers(0, 15))
def test_every_value_of_a_small_tensor_counts(place: int) -> None:
    weights = state()
    before = fingerprint_weights(weights.items())
    weights["norm"][place] += 1
    assert fingerprint_weights(weights.items()) != before


@pytest.mark.parametrize("place", [0, 2, 256, 510])
def test_sampled_values_of_a_large_tensor_count(place: int) -> None:
    weights = state()
    before = fingerprint_weights(weights.items())
    weights["bits"][place] += 1
    assert fingerprint_weights(weights.items()) != before


def test_a_tensor_that_is_scaled_is_noticed() -> None:
    weights = state()
    before = fingerprint_weights(weights.items())
    weights["embed"] *= 1.01
    assert fingerprint_weights(weights.items()) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights.pop("norm"),
        lambda weights: weights.update(bias=torch.zeros(16)),
        lambda weights: weights.update(other=weights.pop("norm")),
        lambda weights: weights.update(embed=weights["embed"].view(16, 50)),
    ],
    ids=["left out", "added", "renamed", "another shape"],
)
def test_names_and_shapes_count(change: Any) -> None:
    weights = state()
    before = fingerprint_weights(weights.items())
    change(weights)
    assert fingerprint_weights(weights.items()) != before


@pytest.mark.parametrize("field", KV_FIELDS)
def test_each_config_field_that_shapes_keys_counts(field: str) -> None:
    name, _, of_nested = field.partition(".")
    value = {"another": "value"}
    changed = identity(CONFIG | {name: {of_nested: value} if of_nested else value})
    assert changed.config_hash != identity().config_hash
    assert changed.kv_config[field] == value


def test_other_config_fields_do_not_count() -> None:
    assert identity(CONFIG | {"use_cache": False, "transformers_version": "9", "head_dim": None}) == identity()


def test_config_values_are_those_that_come_back_from_json() -> None:
    config = CONFIG | {"layer_types": ("full_attention", "sliding_attention")}
    stored = ModelIdentity.model_validate_json(identity(config).model_dump_json())
    assert stored == identity(config)


def test_adapter_and_quantisation_are_kept() -> None:
    quantised = CONFIG | {"quantization_config": {"bits": 4, "dtype": torch.bfloat16}}
    assert identity(adapter="a,b").adapter == "a,b"
    assert "bfloat16" in str(identity(quantised).quantisation)
    assert identity().quantisation is None


def test_each_part_of_a_tokenizer_counts_for_itself() -> None:
    special = {"eos_token": "</s>", "pad_token": "<pad>"}
    base = identify_tokenizer("vocabulary", "template", special)
    assert identify_tokenizer("vocabulary", "template", dict(reversed(special.items()))) == base
    others = {
        "tokenizer_hash": identify_tokenizer("another", "template", special),
        "chat_template_hash": identify_tokenizer("vocabulary", "another", special),
        "special_tokens_hash": identify_tokenizer("vocabulary", "template", special | {"eos_token": "<end>"}),
    }
    for field, other in others.items():
        assert {name for name, value in other.model_dump().items() if value != getattr(base, name)} == {field}
    assert identify_tokenizer("vocabulary", None, special).chat_template_hash is None


def test_a_tensor_that_wraps_others_is_known_by_those() -> None:
    """As quantised weights do, whose own values may not be read."""
    first, second = torch.randn(300, 4), torch.randn(300, 4)
    wrapped = fingerprint_weights([("w", TwoTensor(first, second))])
    assert wrapped == fingerprint_weights([("w.a", first), ("w.b", second)])
    assert wrapped != fingerprint_weights([("w", TwoTensor(first, second + 1))])
