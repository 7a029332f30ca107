"""Linear layers with quantised weights: rounding of the weights to int8 or to four bits, and the products with rows.

`quantise_linears` replaces the linear layers of a loaded model by such layers.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import nn
from torch.nn.functional import linear, pad, silu
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sparsekv.kernels.common.on_cpu import compiled_kernels, threads_of_torch
from sparsekv.kernels.common.on_gpu import on_gpu

GROUP = 32
"""Input channels that share a scale of 4-bit weights."""
PAIR = 2 * GROUP
"""Input channels of a pair of groups: the 4-bit numbers of both groups share bytes, and the scales share a word."""
FEW = 16
"""Maximum number of rows that the kernels multiply. With more rows, the dequantising of all weights costs little."""
TOGETHER = 3
"""Maximum number of layers that multiply a row together: those of queries, keys and values."""
BLOCK = 1 << 24
"""Weights that are rounded at a time, because rounding allocates 16 bytes for each weight."""
WORTH_IT = 1 << 16
"""Minimum number of weights for which using a second CPU core saves time."""


@dataclass(frozen=True)
class Int8Weight:
    """Weights [N, K] as `numbers` [N, K] int8 times the scale of their output channel, `scales` [N] float32."""

    numbers: torch.Tensor
    scales: torch.Tensor
    bits: ClassVar[int] = 8

    @property
    def channels(self) -> int:
        return self.numbers.shape[1]

    def restored(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise the weights [N, K] to `dtype`."""
        weights = torch.empty(self.numbers.shape, dtype=dtype, device=self.numbers.device)
        return torch.mul(self.numbers, self.scales[:, None], out=weights)


@dataclass(frozen=True)
class Int4Weight:
    """Weights [N, K] as numbers of -8 to 7 times the scale of their output channel and group of GROUP input channels.

    `numbers` [N, P, GROUP] uint8 has the numbers plus 8, for each of P pairs of groups. The low four bits of byte j are
    number j of the first group, and its high four bits are number j of the second group. `scales` [N, P, 2] bfloat16
    has the scales of both groups. `channels` is K; the last pair may reach beyond it.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    channels: int
    bits: ClassVar[int] = 4

    def restored(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise the weights [N, K] to `dtype`."""
        numbers = torch.stack([self.numbers & 15, self.numbers >> 4], 2).to(torch.int8) - 8
        weights = torch.empty(numbers.shape, dtype=dtype, device=numbers.device)
        torch.mul(numbers, self.scales[..., None].float(), out=weights)
        return weights.flatten(1)[:, : self.channels]


Weight = torch.Tensor | Int8Weight | Int4Weight
"""Weights [N, K] of a linear layer, rounded or not."""


def round_to_int8(weight: torch.Tensor) -> Int8Weight:
    """Round weights [N, K] to int8, with a scale per output channel that maps its largest magnitude to 127 or -127."""
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    for some in _blocks(weight):
        exact = weight[some].float()
        scales[some] = exact.abs().amax(1) / 127
        steps = torch.where(scales[some] == 0, 1, scales[some])
        numbers[some] = (exact / steps[:, None]).round_()
    return Int8Weight(numbers, scales)


def round_to_int4(weight: torch.Tensor) -> Int4Weight:
    """Round weights [N, K] by groups: the weight of largest magnitude of each group becomes -8.

    A weight of the other sign and nearly the same magnitude becomes 7, so its error is up to a whole step.
    """
    N, pairs = len(weight), -(-weight.shape[1] // PAIR)
    packed = torch.empty(N, pairs, GROUP, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(N, pairs, 2, dtype=torch.bfloat16, device=weight.device)
    for some in _blocks(weight):
        exact = pad(weight[some].float(), (0, -weight.shape[1] % PAIR)).unflatten(1, (pairs, 2, GROUP))
        scales[some] = exact.gather(3, exact.abs().argmax(3, keepdim=True))[..., 0] / -8
        steps = torch.where(scales[some] == 0, 1, scales[some]).float()
        low, high = ((exact / steps[..., None]).round_().clamp_(-8, 7) + 8).to(torch.uint8).unbind(2)
        packed[some] = low | high << 4
    return Int4Weight(packed, scales, weight.shape[1])


def _blocks(weight: torch.Tensor) -> list[slice]:
    """Split the rows of weights [N, K] into ranges of about BLOCK weights."""
    rows = max(1, BLOCK // weight.shape[1])
    return [slice(first, first + rows) for first in range(0, len(weight), rows)]


def _few(rows: torch.Tensor, *_: object) -> bool:
    return 0 < len(rows) <= FEW


@on_gpu("sparsekv.kernels.linear.quantised_triton:int8_linear_triton", fits=_few)
def int8_linear(rows: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply rows [R, K] by weights [N, K] and add a bias [N]; return [R, N] in the rows' dtype."""
    return linear(rows, weight.restored(rows.dtype), bias)


@on_gpu("sparsekv.kernels.linear.quantised_triton:int4_linear_triton", fits=_few)
def int4_linear(rows: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply rows [R, K] by weights [N, K] and add a bias [N]; return [R, N] in the rows' dtype."""
    return linear(rows, weight.restored(rows.dtype), bias)


class RowNorm(NamedTuple):
    """RMS norm of a row: its weight [K], and the number that is added to the mean of the row's squares."""

    weight: torch.Tensor
    epsilon: float


def rms_norm(row: torch.Tensor, norm: RowNorm) -> torch.Tensor:
    """Divide a row [..., K] by the root of the mean of its squares, and multiply it by the norm's weight."""
    exact = row.float()
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + norm.epsilon)
    return norm.weight * (exact * scale).to(row.dtype)


@on_gpu("sparsekv.kernels.linear.quantised_triton:one_row_linears_triton")
def one_row_linears(
    row: torch.Tensor,
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    *,
    norm: RowNorm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply one row [1, K] by the weights of up to three layers; return their outputs side by side, [1, N].

    The weights are all of one kind, and all layers have a bias or none has.

    Args:
        norm: a norm of the row before the products.
        gated: return the SiLU of the first layer's outputs times the second layer's. There are just these two layers.
        residual: [1, N], added to the outputs.
    """
    row = row if norm is None else rms_norm(row, norm)
    restored = [one if isinstance(one, torch.Tensor) else one.restored(row.dtype) for one in weights]
    outputs = [linear(row, weight, bias) for weight, bias in zip(restored, biases, strict=True)]
    found = silu(outputs[0]) * outputs[1] if gated else torch.cat(outputs, 1)
    return found if residual is None else residual + found


def multiply(rows: torch.Tensor, weight: Int8Weight | Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply rows [..., K] by weights [N, K] and add a bias [N]; return [..., N] in the rows' dtype.

    On a CPU with numba and GNU OpenMP, up to FEW rows are multiplied by compiled code (`CompiledProduct`).
    """
    product = CompiledProduct.of(weight, bias) if takes(rows, weight.channels) else None
    if product is not None:
        return product(rows)
    flat = rows.reshape(-1, rows.shape[-1])
    found = int8_linear(flat, weight, bias) if isinstance(weight, Int8Weight) else int4_linear(flat, weight, bias)
    return found.view(*rows.shape[:-1], len(weight.scales))


def takes(rows: torch.Tensor, channels: int) -> bool:
    """Whether `CompiledProduct` can multiply rows [..., K] by weights of `channels` input channels."""
    return rows.is_cpu and rows.shape[-1] == channels and 0 < rows.numel() <= FEW * channels


class CompiledProduct:
    """Compiled product of few rows with a layer's quantised weights on a CPU, on torch's threads.

    The kernel's job holds only the addresses of the tensors, and so this object keeps references to the tensors. A call
    copies the job, because filling a new one takes longer.

    Args:
        kernel: the compiled module.
    """

    def __init__(self, kernel: Any, weight: Int8Weight | Int4Weight, bias: torch.Tensor | None):
        N, K = len(weight.scales), weight.channels
        padded = K if weight.bits == 8 else PAIR * weight.numbers.shape[1]
        self.tensors = weight.numbers, weight.scales, None if bias is None else bias.float().contiguous()
        numbers, scales, more = (0 if one is None else one.data_ptr() for one in self.tensors)
        self.job = kernel.Job(0, numbers, scales, more, 0, 0, 0, N, K, padded, weight.bits)
        self.step, self.outputs, self.channels, self.split = kernel.STEP.address, N, K, N * K >= WORTH_IT
        # The kernel converts the weights for several rows, and 4-bit weights, in scratch memory.
        self.together, self.padded, self.restores = kernel.OUTPUTS, padded, weight.bits == 4

    @classmethod
    def of(cls, weight: Int8Weight | Int4Weight, bias: torch.Tensor | None) -> Self | None:
        """Make the product of a layer; None without numba or GNU OpenMP."""
        kernel = compiled_kernels("quantised_numba", "linear")
        return None if kernel is None else cls(kernel, weight, bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [..., K] that `takes` accepts; return [..., N] in the rows' dtype. Sums are float32."""
        exact = rows.float().contiguous()
        output, number = exact.new_empty((*rows.shape[:-1], self.outputs)), exact.numel() // self.channels
        job = type(self.job).from_buffer_copy(self.job)
        job.rows, job.output, job.R = exact.data_ptr(), output.data_ptr(), number
        threads = torch.get_num_threads() if self.split else 1
        if self.restores or number > 1:
            scratch = exact.new_empty(threads, self.together, self.padded + number)
            job.scratch = scratch.data_ptr()
        threads_of_torch()(self.step, ctypes.addressof(job), threads, 0)
        return output.to(rows.dtype)


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
        self._compiled: CompiledProduct | None = None

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
        if takes(rows, self.in_features) and (product := self._product()) is not None:
            return product(rows)
        return multiply(rows, self.rounded, self.bias)

    def _product(self) -> CompiledProduct | None:
        """Return the compiled product of this layer; None without numba or GNU OpenMP.

        It is made again if the weights' address has changed, because a copied layer begins with the original's product.
        """
        held = self._compiled
        if held is None or held.job.numbers != self.numbers.data_ptr():
            held = self._compiled = CompiledProduct.of(self.rounded, self.bias)
        return held

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
        the share of the model's weights that were rounded. Embeddings are not counted, such as Gemma 3n's per layer.
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
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    left = sum(one.numel() for one in model.parameters() if one not in tables)
    return rounded / (rounded + left)


def _is_plain_linear(name: str, module: nn.Module) -> bool:
    """Whether a module is a linear layer to round: no router or gate, and neither quantised nor sharded."""
    *above, leaf = name.split(".")
    if leaf.endswith("gate") or "gate" in above or any("router" in part for part in (*above, leaf)):
        return False
    kind = type(module)
    linear = isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward
    return (linear or kind is Conv1D) and type(module.weight) is nn.Parameter and module.weight.is_floating_point()
