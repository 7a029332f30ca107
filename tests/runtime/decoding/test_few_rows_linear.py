"""Few tokens' products on all cores are those of torch, and a model's logits with them its own."""

from collections.abc import Callable

import pytest
import torch
from support.reference import assert_close
from support.small_index import plain_logits, random_ids
from support.tiny_models import FAMILIES
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.runtime.decoding import threads as few_rows_linear
from sparsekv.runtime.decoding.compiled import compile_layers
from sparsekv.runtime.decoding.threads import FewRowsLinear, all_cores, split_pays


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts a layer, however many cores a worker of the tests has."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(48,), (1, 48), (1, 1, 48), (2, 2, 48), (1, 5, 48), (0, 48)])
@pytest.mark.parametrize("outputs", [4096, 4095])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_the_same(outputs: int, shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, 48, generator=draw).to(dtype)
    added = torch.randn(outputs, generator=draw).to(dtype) if bias else None
    rows = torch.randn(shape, generator=draw).to(dtype)
    expected = linear(rows, weight, added)
    with FewRowsLinear():
        found = linear(rows, weight, added)
        transposed = linear(rows, weight.t().contiguous().t(), added)
    assert found.dtype == dtype
    for product in (found, transposed):
        assert product.shape == expected.shape
        assert_close(product.float(), expected.float(), 1e-5)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt-oss"])
def test_a_models_logits_are_the_same(family: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows_linear, "WORTH_IT", 1)
    model, token = FAMILIES[family]().eval(), random_ids(tokens)
    expected = plain_logits(model, token)
    with FewRowsLinear():
        assert_close(plain_logits(model, token), expected, 1e-4)


@pytest.mark.parametrize(("rows", "bias"), [((2, 24), None), ((1, 48), torch.float64)])
def test_what_torch_refuses_it_refuses(rows: tuple[int, int], bias: torch.dtype | None) -> None:
    given = torch.ones(rows), torch.ones(4096, 48), None if bias is None else torch.ones(4096, dtype=bias)
    with pytest.raises(RuntimeError):
        linear(*given)
    with pytest.raises(RuntimeError), FewRowsLinear():
        linear(*given)


def test_threads_that_do_not_divide_the_outputs_are_used_as_far_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(few_rows_linear, "_in_parts", lambda rows, weight, bias, number: parts.append(number))
    with FewRowsLinear():
        linear(torch.ones(1, 48), torch.ones(4096, 48), None)
    assert parts == [4]


def test_it_is_for_a_cpu_and_ends_with_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows_linear, "split_pays", lambda threads: True)
    model, row, weight = FAMILIES["llama"]().eval(), torch.ones(1, 48), torch.ones(4096, 48)
    with all_cores(model) as mode:
        assert isinstance(mode, FewRowsLinear)
        within = linear(row, weight, None)
    assert torch.equal(within, linear(row, weight))
    assert not isinstance(all_cores(FAMILIES["llama"]().to("meta")), FewRowsLinear)
    compile_layers(model, backend="eager").remove()
    assert not isinstance(all_cores(model), FewRowsLinear)


@pytest.mark.parametrize("threads", [2, 3, 2000])
@pytest.mark.parametrize(("split", "whole", "pays"), [(1.0, 3.0, True), (1.0, 1.0, False), (3.0, 1.0, False)])
def test_the_faster_product_is_taken(
    threads: int, split: float, whole: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = list[torch.Tensor]()

    def taken(*ways: Callable[[], torch.Tensor]) -> list[float]:
        products.extend(way() for way in ways)
        return [whole, split]

    monkeypatch.setattr(few_rows_linear, "_fastest", taken)
    assert split_pays.__wrapped__(threads) is pays
    assert_close(*products, 1e-5)


def test_one_core_splits_nothing() -> None:
    assert split_pays(1) is False


def test_a_layers_attention_is_one_function_to_it() -> None:
    """Else it looks at each of a hundred operations of it, which takes as long as some of them."""
    model, seen, within = FAMILIES["llama"]().eval(), list[object](), list[bool]()

    class Looking(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def attend(call: AttentionCall) -> torch.Tensor:
        before = len(seen)
        output = call.query + 1 - 1
        within.append(len(seen) > before)
        return output

    with route_attention(model, attend), Looking():
        model(random_ids(1)[None], use_cache=False)
    assert len(within) == model.config.num_hidden_layers
    assert not any(within)
    assert linear in seen
