"""Checkpoints of tiny random models with quantised weights, as their libraries write them."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, TorchAoConfig

from sparsekv.formats.models.converted import silent_transformers

from .tiny_models import save_tiny

GROUP = 32
"""Number of weights that share a scale."""


def _torchao(kind: str) -> Any:
    """Return torchao's config of a kind. Imported here, because not all tests run with torchao."""
    from torchao import quantization

    if kind == "int4":
        granularity = quantization.PerGroup(GROUP)
        return quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=granularity)
    if kind == "int8":
        return quantization.Int8WeightOnlyConfig()
    return quantization.Int8DynamicActivationInt8WeightConfig()


def save_torchao(folder: Path, plain: Path | str, kind: str, dtype: torch.dtype = torch.float32) -> None:
    """Quantise the linear layers of the model in the folder `plain` by torchao, and save the model."""
    settings = TorchAoConfig(_torchao(kind))
    with silent_transformers():
        AutoModelForCausalLM.from_pretrained(plain, dtype=dtype, quantization_config=settings).save_pretrained(folder)


def save_quantised(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    """Save a tiny quantised model with a tokenizer, and return the folder.

    `kind` is one of KINDS, or `torchao-int8-activations`.
    """
    save_tiny(folder, "gpt-oss" if kind == "mxfp4" else "llama")
    if kind.startswith("torchao"):
        save_torchao(folder, folder, kind.removeprefix("torchao-"), dtype)
    else:
        file = folder / "model.safetensors"
        settings, weights = QUANTISED[kind](load_file(file))
        save_file(weights, file, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder


Weights = dict[str, torch.Tensor]


def _packed(bits: int) -> Callable[[Weights], tuple[dict[str, Any], Weights]]:
    """Return a function that packs weights into int32 as compressed-tensors writes those of GPTQ and AWQ.

    The function returns the quantisation settings of the model's config, and the tensors of the checkpoint.
    """

    def pack(weights: Weights) -> tuple[dict[str, Any], Weights]:
        arguments = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
        group = {"targets": ["Linear"], "weights": arguments, "input_activations": None, "output_activations": None}
        settings = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
        }
        return settings, {name: part for whole, weight in weights.items() for name, part in parts(whole, weight)}

    def parts(whole: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        if "_proj" not in whole:
            return [(whole, weight)]
        groups = weight.view(len(weight), -1, GROUP)
        highest = 2 ** (bits - 1) - 1
        scales = groups.abs().amax(-1) / highest
        numbers = (groups / scales[..., None]).round().to(torch.int64).view(len(weight), -1) + highest + 1
        each = 32 // bits
        shifted = numbers.view(len(weight), -1, each) << (bits * torch.arange(each))
        words = shifted.sum(-1)
        return [
            (f"{whole}_packed", torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)),
            (f"{whole}_scale", scales),
            (f"{whole}_shape", torch.tensor(weight.shape)),
        ]

    return pack


def _fp8(weights: Weights) -> tuple[dict[str, Any], Weights]:
    """Round weights to float8 with a scale for each block, as DeepSeek writes them; return settings and tensors."""
    found: Weights = {}
    for name, weight in weights.items():
        found[name] = weight
        if "_proj" in name:
            rows, columns = weight.shape
            blocks = weight.view(rows // GROUP, GROUP, columns // GROUP, GROUP)
            scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            found[name] = (blocks / scales[:, None, :, None]).view_as(weight).to(torch.float8_e4m3fn)
            found[f"{name}_scale_inv"] = scales
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]}, found


def _mxfp4(weights: Weights) -> tuple[dict[str, Any], Weights]:
    """Make random expert weights in float4, with an exponent for each 32, like gpt-oss; return settings and tensors."""
    found: Weights = {}
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        groups = (experts, outputs, inputs // 32)
        found[f"{name}_blocks"] = torch.randint(256, (*groups, 16), dtype=torch.uint8, generator=generator)
        found[f"{name}_scales"] = torch.randint(122, 126, groups, dtype=torch.uint8, generator=generator)
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {"quant_method": "mxfp4", "modules_to_not_convert": plain}, found


QUANTISED = {"compressed-8": _packed(8), "compressed-4": _packed(4), "fp8": _fp8, "mxfp4": _mxfp4}
KINDS = ("torchao-int8", "torchao-int4", *QUANTISED)
"""Kinds that quantise only weights, or that are unpacked on a CPU, so that rounding differs as little as for plain
weights."""


def load_plainly(folder: Path) -> Any:
    """Load a model by transformers alone."""
    with silent_transformers(), contextlib.redirect_stderr(io.StringIO()):
        return AutoModelForCausalLM.from_pretrained(folder).eval()
