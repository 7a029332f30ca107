"""Rows are captured as a layer attends to them, whatever it keeps in its cache."""

import pytest
import torch
from support.causal_families import tiny_config, tiny_model, variants
from support.family_sweep import sweep
from support.random_tensors import normal
from support.small_index import random_ids

from sparsekv.indexing.capture.capture import capture
from sparsekv.kernels.common.given_rows import logits_over_rows
from sparsekv.kernels.common.hook import equal_channels

TOKENS = 40
CASES = {
    "latents of one size": ("deepseek_v3", {"v_head_dim": 16, "qk_nope_head_dim": 8}),
    "values smaller than keys": ("deepseek_v3", {"v_head_dim": 12, "qk_nope_head_dim": 16}),
    "values larger than keys": ("deepseek_v3", {"v_head_dim": 32, "qk_nope_head_dim": 8}),
    "interleaved": ("deepseek_v2", {}),
    "keys repeated after the cache": ("jetmoe", {}),
    "keys of another layer": ("gemma3n_text", variants("gemma3n_text")["shared"]),
}


@pytest.mark.parametrize("name", CASES)
def test_an_index_answers_as_the_model_itself(name: str) -> None:
    family, changes = CASES[name]
    assert sweep(family, changes).verdict == "right"


@pytest.mark.parametrize("name", CASES)
def test_the_models_own_attention_takes_captured_rows(name: str) -> None:
    """As canary and probe have it, however large the rows in its own cache are."""
    family, changes = CASES[name]
    model, ids = tiny_model(tiny_config(family, **changes)), random_ids(TOKENS)
    captured = capture(model, ids, tail=1, chunk_size=16)
    with torch.inference_mode():
        own = model(input_ids=ids[None], use_cache=False).logits[0, -3:]
    over_rows = logits_over_rows(model, ids[-3:], TOKENS - 3, lambda layer, own: captured.rows(layer), {})
    torch.testing.assert_close(over_rows, own, rtol=1e-3, atol=1e-3 * float(own.abs().max()))
    # rows of other tokens are really read
    other = logits_over_rows(
        model,
        ids[-3:],
        TOKENS - 3,
        lambda layer, own: (captured.rows(layer)[0].roll(1, 1), captured.rows(layer)[1]),
        {},
    )
    assert not torch.allclose(other, own, rtol=1e-2)


def test_channels_are_padded_with_zeros() -> None:
    query, keys, values = equal_channels(normal(0, 2, 3, 6), normal(1, 2, 4, 6), normal(2, 2, 4, 5))
    assert query.shape[-1] == keys.shape[-1] == values.shape[-1] == 6
    assert torch.equal(values[..., :5], normal(2, 2, 4, 5))
    assert not values[..., 5:].any()
