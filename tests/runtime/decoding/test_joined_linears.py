"""Linear layers that multiply the same row become one operator of a compiled graph, with the same output."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from support.random_tensors import normal
from support.reference import assert_close, relative_error
from support.small_index import random_ids
from support.tiny_models import FAMILIES
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.nn.functional import linear, rms_norm, silu
from transformers import DynamicCache

from sparsekv.kernels.common.hook import route_attention
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
from sparsekv.runtime.decoding.joined_linears import JoinLinears, joined_or

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


class Joint(NamedTuple):
    """A joint product of a graph: its number of weights, and what else it computes."""

    weights: int
    norm: bool = False
    gated: bool = False
    residual: bool = False


class Rotated(NamedTuple):
    """Rotated heads of a graph: the query's heads, and the number of norms."""

    queries: int
    norms: int


def _joined(layer: Callable[..., Any]) -> tuple[Callable[..., Any], list[Joint | Rotated]]:
    """The layer compiled with the pass, and a list that gets the graph's joint products and rotated heads."""
    joints: list[Joint | Rotated] = []

    def compile_graph(module: GraphModule, inputs: Any) -> Callable[..., Any]:
        JoinLinears("cpu")(module.graph)
        for node in module.graph.nodes:
            if node.target is torch.ops.sparsekv.one_row_linears.default:
                _, weights, _, _, norm, _, gated, residual = node.args
                joints.append(Joint(len(weights), norm is not None, gated, residual is not None))
            elif node.target is torch.ops.sparsekv.rotated_heads.default:
                joints.append(Rotated(node.args[1], len(node.args[4])))
        module.recompile()
        return module

    backend = aot_autograd(fw_compiler=compile_graph, decompositions=select_decomp_table())
    return torch.compile(layer, backend=backend), joints


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [16, 8, 4])
@torch.inference_mode()
def test_layers_of_one_row_are_joined(bits: int, bias: bool) -> None:
    layer = Layer(bits, bias=bias)
    compiled, joints = _joined(layer)
    x = normal(1, 1, 1, CHANNELS).bfloat16()
    assert_close(compiled(x), layer(x).double(), 8e-3)
    assert joints == [Joint(3), Joint(1, residual=True), Joint(2, gated=True), Joint(1, residual=True)]


REST = [Joint(1, residual=True), Joint(2, norm=True, gated=True), Joint(1, residual=True)]


def _logits(family: str, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Joint | Rotated]]:
    """Logits of one token: by the compiled bfloat16 model, by the same model, and by a float32 model; the operators."""
    model, exact = FAMILIES[family]().to(torch.bfloat16), FAMILIES[family]()  # type: ignore[call-overload]
    if bits < 16:
        quantise_linears(model, bits)
        quantise_linears(exact, bits)
    compiled, joints = _joined(lambda ids: model(input_ids=ids, use_cache=False).logits)
    ids = random_ids(1)[None]
    return compiled(ids), model(input_ids=ids).logits, exact(input_ids=ids).logits.double(), joints


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(("family", "layers", "norms"), [("llama", 3, 0), ("qwen2", 4, 0), ("qwen3", 3, 2)])
@torch.inference_mode()
def test_norms_gates_residuals_and_rope_of_models(family: str, layers: int, norms: int, bits: int) -> None:
    found, plain, exact, joints = _logits(family, bits)
    assert relative_error(found, exact) < 2 * relative_error(plain, exact)
    assert joints == [Joint(3, norm=True), Rotated(4, norms), *REST] * layers + [Joint(1)]


def _given_to_others(family: str, dtype: torch.dtype = torch.bfloat16) -> tuple[list[GraphModule], float, float]:
    """Graphs of layers that `joined_or` gives to the other backend; errors of the compiled and of the eager model."""
    model, exact = FAMILIES[family]().to(dtype), FAMILIES[family]()  # type: ignore[call-overload]
    given: list[GraphModule] = []

    def otherwise(module: GraphModule, _: list[Any]) -> Callable[..., Any]:
        given.append(module)
        return module

    ids, names = random_ids(1)[None], set(model._no_split_modules)
    truth = exact(input_ids=ids).logits.double()
    with route_attention(model, lambda call: call.values.repeat_interleave(2, 0)):  # attention to a single key
        eager = model(input_ids=ids, use_cache=False).logits
        for module in model.modules():
            if type(module).__name__ in names:
                module.compile(backend=joined_or(otherwise, "cpu"))
        compiled = model(input_ids=ids, use_cache=False).logits
    return given, relative_error(compiled, truth), relative_error(eager, truth)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.inference_mode()
def test_joined_layers_need_no_other_backend(family: str) -> None:
    given, error, eager = _given_to_others(family)
    assert not given
    assert error < 2 * eager


@pytest.mark.parametrize(("family", "dtype"), [("gemma3", torch.bfloat16), ("llama", torch.float32)])
@torch.inference_mode()
def test_other_layers_go_to_the_other_backend(family: str, dtype: torch.dtype) -> None:
    given, error, eager = _given_to_others(family, dtype)
    assert given
    assert error <= eager + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama", "qwen2", "qwen3")])
@torch.inference_mode()
def test_models_of_other_forms(family: str) -> None:
    found, plain, exact, joints = _logits(family, 16)
    assert relative_error(found, exact) < 1.5 * relative_error(plain, exact)
    assert joints


def _normal(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm as the models' own."""
    exact = x.float()
    return weight * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _read_twice(
    x: torch.Tensor, norm: torch.Tensor, w: torch.Tensor, v: torch.Tensor, one: torch.Tensor
) -> torch.Tensor:
    """A norm, both parts of a gate and a sum that are read elsewhere, too."""
    row = _normal(x, norm)
    gate, up = linear(row, w), linear(row, v)
    return torch.cat([row, silu(gate) * up, up, gate], -1)


def _other_order(
    x: torch.Tensor, norm: torch.Tensor, w: torch.Tensor, v: torch.Tensor, one: torch.Tensor
) -> torch.Tensor:
    """The second layer's output is activated, and a sum has no residual but another product."""
    up, gate = linear(x, w), linear(x, v)
    return linear(x, w) + linear(silu(gate) * up, w[:, :48]) + norm.float()[:48].to(x.dtype)


def _broad_norm(
    x: torch.Tensor, norm: torch.Tensor, w: torch.Tensor, v: torch.Tensor, one: torch.Tensor
) -> torch.Tensor:
    """A norm whose weight is one number."""
    return linear(_normal(x, one), w)


def _broad_residual(
    x: torch.Tensor, norm: torch.Tensor, w: torch.Tensor, v: torch.Tensor, one: torch.Tensor
) -> torch.Tensor:
    return linear(x, w) + one


def _exact_residual(
    x: torch.Tensor, norm: torch.Tensor, w: torch.Tensor, v: torch.Tensor, one: torch.Tensor
) -> torch.Tensor:
    return linear(x, w) + norm[:48].float()


Rows = tuple[torch.Tensor, ...]


def _rope(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE as the models' own, of heads [1, 1, H, D]."""
    heads = heads.transpose(1, 2)
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    return heads * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)


def _both(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor) -> Rows:
    return _rope(query, cos, sin), _rope(key, cos, sin)


def _one_norm(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor) -> Rows:
    return _rope(_normal(query, norm), cos, sin), _rope(key, cos, sin)


def _some_channels(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor
) -> Rows:
    some, more = cos[..., :8], sin[..., :8]
    return _rope(query[..., :8], some, more), _rope(key[..., :8], some, more)


def _two_angles(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor
) -> Rows:
    return _rope(query, cos, sin), _rope(key, sin, cos)


def _three(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor) -> Rows:
    return _rope(query, cos, sin), _rope(key[:, :, :1], cos, sin), _rope(key[:, :, 1:], cos, sin)


def _scaled(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor) -> Rows:
    """One angle for all channels."""
    return _both(query, key, cos[..., :1], sin[..., :1], norm)


@pytest.mark.parametrize(
    ("rope", "joined"),
    [(_both, 1), (_one_norm, 0), (_some_channels, 0), (_two_angles, 0), (_three, 0), (_scaled, 0)],
)
@torch.inference_mode()
def test_rope_that_the_kernel_does_not_compute_stays(rope: Callable[..., Rows], joined: int) -> None:
    def compute(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, *more: torch.Tensor) -> Rows:
        query, key = linear(x, w).view(1, 1, 3, 16), linear(x, v).view(1, 1, 2, 16)
        return rope(query, key, *more)

    x, norm = normal(1, 1, 1, CHANNELS).bfloat16(), 1 + normal(2, 16).bfloat16()
    w, v = normal(3, 48, CHANNELS).bfloat16(), normal(4, 32, CHANNELS).bfloat16()
    cos, sin = normal(5, 1, 1, 16).bfloat16(), normal(6, 1, 1, 16).bfloat16()
    compiled, joints = _joined(compute)
    for found, expected in zip(compiled(x, w, v, cos, sin, norm), compute(x, w, v, cos, sin, norm), strict=True):
        assert_close(found, expected.double(), 1e-2)
    assert [type(one) for one in joints].count(Rotated) == joined


@pytest.mark.parametrize("compute", [_read_twice, _other_order, _broad_norm, _broad_residual, _exact_residual])
@torch.inference_mode()
def test_what_a_product_cannot_take_stays(compute: Callable[..., torch.Tensor]) -> None:
    x, norm = normal(1, 1, 1, CHANNELS).bfloat16(), 1 + normal(2, CHANNELS).bfloat16()
    w, v, one = normal(3, 48, CHANNELS).bfloat16(), normal(4, 48, CHANNELS).bfloat16(), 1 + normal(5, 1).bfloat16()
    compiled, joints = _joined(compute)
    assert_close(compiled(x, norm, w, v, one), compute(x, norm, w, v, one).double(), 1e-2)
    assert joints
    assert {one[1:] for one in joints if isinstance(one, Joint)} <= {
        (False, False, False),
        (False, False, compute is _other_order),
    }


@torch.inference_mode()
def test_a_gate_of_many_outputs_times_one_output_stays() -> None:
    gate, up = (_linear(outputs, CHANNELS, 8, bias=False, dtype=torch.bfloat16) for outputs in (48, 1))
    compiled, joints = _joined(lambda x: silu(gate(x)) * up(x))
    x = normal(1, 1, 1, CHANNELS).bfloat16()
    assert_close(compiled(x), (silu(gate(x)) * up(x)).double(), 3e-2)
    assert joints == [Joint(2)]


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

    def counted(row: torch.Tensor, weights: Sequence[Weight], *more: Any, **named: Any) -> torch.Tensor:
        numbers.append(len(weights))
        return one_row_linears(row, weights, *more, **named)

    monkeypatch.setattr(joined_linears, "one_row_linears", counted)
    expected = logits()
    hook = compile_layers(model)
    found = logits()
    hook.remove()
    torch.compiler.set_stance("default")
    assert_close(found.cpu(), expected.double().cpu(), 3e-2)
    assert {2, 3} <= set(numbers) <= {1, 2, 3}
