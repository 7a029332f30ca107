"""One token's products on all cores are those of torch, and a model's logits with them its own."""

import pytest
import torch
from support.reference import assert_close
from support.small_index import plain_logits, random_ids
from support.tiny_models import FAMILIES
from torch.nn.functional import linear

from sparsekv.runtime.decoding import one_row_linear
from sparsekv.runtime.decoding.one_row_linear import OneRowLinear


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts a layer, however many cores a worker of the tests has."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(48,), (1, 48), (1, 1, 48), (2, 3, 48)])
@pytest.mark.parametrize("outputs", [4096, 4095])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_the_same(outputs: int, shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, 48, generator=draw).to(dtype)
    added = torch.randn(outputs, generator=draw).to(dtype) if bias else None
    rows = torch.randn(shape, generator=draw).to(dtype)
    expected = linear(rows, weight, added)
    with OneRowLinear():
        found = linear(rows, weight, added)
        transposed = linear(rows, weight.t().contiguous().t(), added)
    assert found.dtype == dtype
    for product in (found, transposed):
        assert product.shape == expected.shape
        assert_close(product.float(), expected.float(), 1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt-oss"])
def test_a_models_logits_are_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_row_linear, "WORTH_IT", 1)
    model, token = FAMILIES[family]().eval(), random_ids(1)
    expected = plain_logits(model, token)
    with OneRowLinear():
        assert_close(plain_logits(model, token), expected, 1e-4)
