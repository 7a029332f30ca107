"""Linear layers with quantised weights, which replace the layers of a loaded model."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sparsekv.kernels.linear.quantised import Int4Weight, Int8Weight, multiply, round_to_int4, round_to_int8


class QuantisedLinear(nn.Module):
    """A linear layer whose weights are int8 or 4-bit numbers with scales; a bias stays in its dtype.

    Args:
        weight: rounded weights [N, K].
        bias: [N], or None.
        dtype: the dtype of the weights before they were rounded.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: Int8Weight | Int4Weight, bias: torch.Tensor | None, dtype: torch.dtype):
        super().__init__()
        self.in_features, self.out_features = weight.channels, len(weight.scales)
        self.dtype = dtype
        self.register_buffer("numbers", weight.numbers)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("bias", bias)

    @property
    def rounded(self) -> Int8Weight | Int4Weight:
        return rounded(self.numbers, self.scales, self.in_features)

    @property
    def weight(self) -> torch.Tensor:
        """The dequantised weights [N, K]; some models read a layer's weights or their dtype."""
        return self.rounded.restored(self.dtype)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            output: torch.Tensor = _opaque(rows, self.numbers, self.scales, self.bias)
            return output
        return multiply(rows, self.rounded, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.rounded.bits}"


def rounded(numbers: torch.Tensor, scales: torch.Tensor, channels: int) -> Int8Weight | Int4Weight:
    """Return the weights that a layer's tensors hold; the dtype of `numbers` tells int8 from 4-bit weights."""
    return Int8Weight(numbers, scales) if numbers.dtype == torch.int8 else Int4Weight(numbers, scales, channels)


@torch.library.custom_op("sparsekv::quantised_linear", mutates_args=())
def _opaque(rows: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Run `multiply` as one opaque operator for torch's compiler, which compiles only the code around it."""
    return multiply(rows, rounded(numbers, scales, rows.shape[-1]), bias)


@_opaque.register_fake
def _output_of(
    rows: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], len(scales))


def quantise_linears(model: PreTrainedModel, bits: int) -> float:
    """Replace a model's linear layers in place, one after another, by layers with weights of 8 or 4 bits.

    Allocates the rounded weights of all layers; the original weights are freed layer by layer. If the output layer
    shares its weights with the embedding, the embedding keeps them, and the output layer's rounded weights are added.

    Routers and gates are not rounded, because a small error of their weights selects other experts. Fused experts are
    not rounded, because they are not linear layers.

    Returns:
        the share of the model's weights that were rounded, embedding excluded.
    """
    rounded = 0
    for name in [name for name, module in model.named_modules() if _is_plain_linear(name, module)]:
        module: Any = model.get_submodule(name)
        weight = module.weight.detach()
        weight = weight.t() if isinstance(module, Conv1D) else weight
        bias = None if module.bias is None else module.bias.detach()
        made = round_to_int8(weight) if bits == 8 else round_to_int4(weight)
        model.set_submodule(name, QuantisedLinear(made, bias, weight.dtype))
        rounded += weight.numel()
    embedding: Any = model.get_input_embeddings()
    left = sum(one.numel() for one in model.parameters()) - int(embedding.weight.numel())
    return rounded / (rounded + left)


def _is_plain_linear(name: str, module: nn.Module) -> bool:
    """Whether a module is a linear layer, not of a router or gate, of weights neither quantised nor sharded."""
    *above, leaf = name.split(".")
    if leaf.endswith("gate") or "gate" in above or any("router" in part for part in (*above, leaf)):
        return False
    kind = type(module)
    linear = isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward
    return (linear or kind is Conv1D) and type(module.weight) is nn.Parameter and module.weight.is_floating_point()
