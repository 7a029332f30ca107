"""Tests of overflow in a build: it is told before it is written, and another dtype goes on in the same folder."""

from pathlib import Path

import pytest
import torch
from support.small_index import reopen, small_plan

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.index.schema import MANIFEST
from sparsekv.indexing.build import build_index
from sparsekv.indexing.plan import BuildPlan


def grown(weights: str, dtype: torch.dtype) -> BuildPlan:
    """A plan whose model has one weight so large that what it gives fits float32 alone."""
    plan = small_plan()
    dict(plan.loaded.model.named_parameters())[weights].data.mul_(1e5)
    plan.loaded.model.to(dtype)
    return plan


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ("model.layers.1.self_attn.k_proj.weight", "keys of layer 1"),
        ("model.layers.0.self_attn.v_proj.weight", "values of layer 0"),
        ("model.layers.2.self_attn.q_proj.weight", "queries of layer 2"),
        ("lm_head.weight", "logits"),
    ],
)
def test_what_overflows_is_named_and_another_dtype_goes_on(weights: str, what: str, tmp_path: Path) -> None:
    folder = tmp_path / "small.skv"
    message = f"{what} are not finite in float16; use --dtype bfloat16 or float32"
    with pytest.raises(SparsekvError, match=message) as error:
        build_index(grown(weights, torch.float16), folder)
    assert error.value.exit_code == 1
    assert not (folder / MANIFEST).exists()
    whole = grown(weights, torch.float32)
    build_index(whole, folder)
    reopen(whole, folder)


def test_without_a_wider_dtype_the_weights_are_suspected(tmp_path: Path) -> None:
    plan = small_plan()
    plan.loaded.model.model.layers[1].self_attn.v_proj.weight.data[3, 5] = torch.nan
    with pytest.raises(SparsekvError, match="values of layer 1 are not finite in float32; the model's weights may be"):
        build_index(plan, tmp_path / "small.skv")
