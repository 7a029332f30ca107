"""RMS norms of a model in one compiled call, compared with their definition in float64 and with transformers' own."""

import importlib
import sys
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from support.kernel_runs import poisoned_memory
from support.random_tensors import normal
from support.reference import assert_close
from support.tiny_models import FAMILIES, build_tiny
from torch import nn
from transformers import Gemma2Config, LlamaConfig, PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from sparsekv.kernels.linear.rms_norm import FEW, CompiledNorm, compile_norms

IDS = torch.arange(40)[None]


class SumRMSNorm(LlamaRMSNorm):
    """A norm by another formula: the sum of squares instead of their mean."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden_states * torch.rsqrt(hidden_states.pow(2).sum(-1, keepdim=True) + 1e-5)


def with_norm(norm: nn.Module) -> PreTrainedModel:
    """A model whose last norm is `norm`, with random weights."""
    importlib.import_module("numba")
    model = build_tiny(LlamaConfig)()
    with torch.no_grad():
        norm.weight.copy_(normal(1, len(norm.weight)))
    model.set_submodule("model.norm", norm)
    return model


def definition(rows: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    rows = rows.double()
    return rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)


@pytest.mark.parametrize(("kind", "offset"), [(LlamaRMSNorm, 0), (Olmo2RMSNorm, 0), (Gemma2RMSNorm, 1)])
@pytest.mark.parametrize("channels", [1, 7, 64, 576])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (1, 9, 1), (4, FEW), (1, 0)], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0])
@torch.inference_mode()
def test_norm_is_its_definition(
    kind: Callable[..., nn.Module], offset: float, channels: int, shape: tuple[int, ...], scale: float
) -> None:
    model = with_norm(kind(channels, eps=1e-5))
    compile_norms(model)
    norm, rows = model.get_submodule("model.norm"), scale * normal(2, *shape, channels)
    assert isinstance(norm, CompiledNorm)
    expected = definition(rows, norm.weight, 1e-5, offset)
    with poisoned_memory():
        assert_close(norm(rows), expected, 1e-6)
        assert_close(norm(rows.transpose(0, -2)), expected.transpose(0, -2), 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_model_with_compiled_norms(family: str) -> None:
    importlib.import_module("numba")
    model = FAMILIES[family]()
    before, parameters = [model(IDS[:, :length]).logits for length in (1, 3, 40)], dict(model.named_parameters())
    replaced = compile_norms(model)
    assert replaced == sum("RMSNorm" in type(one).__name__ for one in FAMILIES[family]().modules())
    assert compile_norms(model) == 0
    for length, expected in zip((1, 3, 40), before, strict=True):
        assert_close(model(IDS[:, :length]).logits, expected, 1e-5)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert list(after) == list(parameters)


def other_norms() -> dict[str, nn.Module]:
    hooked, half, bent = LlamaRMSNorm(64), LlamaRMSNorm(64).bfloat16(), LlamaRMSNorm(64)
    hooked.register_forward_hook(lambda module, rows, output: output + 1)
    bent.forward = lambda rows: rows  # type: ignore[method-assign]
    return {
        "another formula": SumRMSNorm(64),
        "a gate": MambaRMSNormGated(64, group_size=64),
        "a hook": hooked,
        "another forward": bent,
        "bfloat16": half,
        "a mean": nn.LayerNorm(64, bias=False),
    }


@pytest.mark.parametrize("name", other_norms())
def test_other_norms_stay(name: str) -> None:
    norm = other_norms()[name]
    model = with_norm(norm)
    compile_norms(model)
    assert model.get_submodule("model.norm") is norm


def test_copied_norm_has_its_own_weights() -> None:
    model = with_norm(LlamaRMSNorm(64))
    compile_norms(model)
    norm, row = model.get_submodule("model.norm"), normal(0, 1, 64)
    copied = deepcopy(norm)
    with torch.inference_mode():
        copied.weight.zero_()
        assert not copied(row).any()
        assert norm(row).all()


def test_gradients_are_those_of_the_models_norms() -> None:
    importlib.import_module("numba")
    gradients = []
    for compiled in (False, True):
        model = build_tiny(Gemma2Config)()
        if compiled:
            assert compile_norms(model)
        model(IDS[:, :3], labels=IDS[:, :3]).loss.backward()
        gradients.append([one.grad for one in model.parameters()])
    for expected, found in zip(*gradients, strict=True):
        assert_close(found, expected, 1e-4)


def test_norms_stay_before_numba_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_norm(LlamaRMSNorm(64))
    monkeypatch.delitem(sys.modules, "numba")
    assert compile_norms(model) == 0
