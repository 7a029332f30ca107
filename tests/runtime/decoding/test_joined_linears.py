"""Linear layers that multiply the same row become one operator of a compiled graph, with the same output."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support.random_tensors import normal
from support.reference import assert_close
from support.small_index import random_ids
from support.tiny_models import FAMILIES
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.nn.functional import linear, rms_norm, silu
from transformers import DynamicCache

from sparsekv.kernels.linear.quantised import (
    QuantisedLinear,
    Weight,
    one_row_linears,
    quantise_linears,
    round_to_int4,
    round_to_int8,
)
from sparsekv.runtime.decoding import joined_linears
from sparsekv.runtime.decoding.compiled import compile_layers
from sparsekv.runtime.decoding.joined_linears import JoinLinears

CHANNELS = 64


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _linear(outputs: int, channels: int, bits: int, *, bias: bool, dtype: torch.dtype) -> nn.Module:
    layer = nn.Linear(channels, outputs, bias=bias).to(dtype)
    if bits == 16:
        return layer
    weight = layer.weight.detach()
    rounded = round_to_int8(weight) if bits == 8 else round_to_int4(weight)
    return QuantisedLinear(rounded, None if layer.bias is None else layer.bias.detach(), dtype)


class Layer(nn.Module):
    """A decoder layer whose attention is a product of its heads."""

    def __init__(self, bits: int, *, bias: bool = False, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        shapes = {"q": (96, 64), "k": (32, 64), "v": (32, 64), "o": (64, 96), "g": (128, 64), "u": (128, 64)}
        for name, (outputs, channels) in (shapes | {"d": (CHANNELS, 128)}).items():
            self.add_module(name, _linear(outputs, channels, bits, bias=bias, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row = rms_norm(x, (CHANNELS,))
        query, key, value = self.q(row), self.k(row), self.v(row)
        heads = query.unflatten(-1, (3, 32)) * key[..., None, :] + value[..., None, :]
        x = x + self.o(heads.flatten(-2))
        row = rms_norm(x, (CHANNELS,))
        return x + self.d(silu(self.g(row)) * self.u(row))


def _joined(layer: Callable[..., torch.Tensor]) -> tuple[Callable[..., torch.Tensor], list[int]]:
    """The layer compiled with the pass, and a list that gets the number of weights of each operator."""
    numbers: list[int] = []

    def compile_graph(module: GraphModule, inputs: Any) -> Callable[..., Any]:
        JoinLinears("cpu")(module.graph)
        found = module.graph.find_nodes(op="call_function", target=torch.ops.sparsekv.one_row_linears.default)
        numbers.extend(len(node.args[1]) for node in found)
        module.recompile()
        return module

    backend = aot_autograd(fw_compiler=compile_graph, decompositions=select_decomp_table())
    return torch.compile(layer, backend=backend), numbers


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("bits", "joined"), [(16, [3, 1, 2, 1]), (8, [3, 2]), (4, [3, 2])])
@torch.inference_mode()
def test_layers_of_one_row_are_joined(bits: int, joined: list[int], bias: bool) -> None:
    layer = Layer(bits, bias=bias)
    compiled, numbers = _joined(layer)
    x = normal(1, 1, 1, CHANNELS).bfloat16()
    assert_close(compiled(x), layer(x).double(), 8e-3)
    assert numbers == joined


@pytest.mark.parametrize("bits", [16, 8])
@torch.inference_mode()
def test_several_rows_are_left_to_torch(bits: int) -> None:
    layer = Layer(bits)
    compiled, numbers = _joined(layer)
    x = normal(1, 1, 5, CHANNELS).bfloat16()
    assert_close(compiled(x), layer(x).double(), 8e-3)
    assert not numbers


@torch.inference_mode()
def test_float32_weights_are_left_to_torch() -> None:
    layer = Layer(16, dtype=torch.float32)
    compiled, numbers = _joined(layer)
    x = normal(1, 1, 1, CHANNELS)
    assert_close(compiled(x), layer(x).double(), 1e-5)
    assert not numbers


@torch.inference_mode()
def test_only_products_of_the_same_row_and_of_given_weights_are_joined() -> None:
    """Five layers of one row in two operators; another row, a computed weight and a transposed one by themselves."""
    weights = [normal(seed, 16, CHANNELS).bfloat16() for seed in range(8)]

    def products(x: torch.Tensor, y: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        of_x = [linear(x, one) for one in weights[:5]]
        return torch.cat([*of_x, linear(y, weights[5]), linear(x, 2 * weights[6]), x @ weights[7].T.contiguous()], -1)

    compiled, numbers = _joined(products)
    x, y = normal(8, 1, CHANNELS).bfloat16(), normal(9, 1, CHANNELS).bfloat16()
    assert_close(compiled(x, y, *weights), products(x, y, *weights).double(), 8e-3)
    assert numbers == [3, 2, 1]


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "bits"), [("llama", 16), ("qwen2", 16), ("qwen3", 8), ("qwen2", 8), ("llama", 4)])
@torch.inference_mode()
def test_compiled_steps_on_a_gpu_give_the_models_logits(
    family: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FAMILIES[family]().to("cuda", torch.bfloat16)  # type: ignore[call-overload]  # transformers wraps `to`
    if bits < 16:
        quantise_linears(model, bits)
    tokens, numbers = random_ids(12).to("cuda"), list[int]()

    def logits() -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        steps = [tokens[:8], *tokens[8:].split(1)]
        return torch.cat([model(input_ids=one[None], past_key_values=cache).logits[0] for one in steps])

    def counted(row: torch.Tensor, weights: Sequence[Weight], biases: Sequence[torch.Tensor | None]) -> torch.Tensor:
        numbers.append(len(weights))
        return one_row_linears(row, weights, biases)

    monkeypatch.setattr(joined_linears, "one_row_linears", counted)
    expected = logits()
    hook = compile_layers(model)
    found = logits()
    hook.remove()
    torch.compiler.set_stance("default")
    assert_close(found.cpu(), expected.double().cpu(), 3e-2)
    assert {2, 3} <= set(numbers) <= {1, 2, 3}
