"""Linear layers with quantised weights: rounding of the weights to int8 or to four bits, and the products with rows."""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, pad

from sparsekv.kernels.common.on_gpu import on_gpu

GROUP = 32
"""Input channels that share a scale in four bits."""
PAIR = 2 * GROUP
"""Input channels of two groups, whose numbers share bytes and whose scales share an int32 word."""
FEW = 16
"""Most rows that the kernels multiply; with more rows, the time of dequantising the weights is small."""


@dataclass(frozen=True)
class Int8Weight:
    """Weights [N, K] as `numbers` [N, K] int8 times the scale of their output channel, `scales` [N] float32."""

    numbers: torch.Tensor
    scales: torch.Tensor

    def restored(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise the weights [N, K] to `dtype`."""
        weights = torch.empty(self.numbers.shape, dtype=dtype, device=self.numbers.device)
        return torch.mul(self.numbers, self.scales[:, None], out=weights)


@dataclass(frozen=True)
class Int4Weight:
    """Weights [N, K] as numbers of -8 to 7 times the scale of their output channel and group of GROUP input channels.

    `packed` [N, P, GROUP] uint8 has for each pair of groups the numbers plus 8: byte j has number j of the first group in
    its low four bits, and number j of the second group in its high four bits. `scales` [N, P, 2] bfloat16 has the scales
    of both. `channels` is K; the last pair may reach beyond it.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    channels: int

    def restored(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise the weights [N, K] to `dtype`."""
        numbers = torch.stack([self.packed & 15, self.packed >> 4], 2).to(torch.int8) - 8
        weights = torch.empty(numbers.shape, dtype=dtype, device=numbers.device)
        torch.mul(numbers, self.scales[..., None].float(), out=weights)
        return weights.flatten(1)[:, : self.channels]


def round_to_int8(weight: torch.Tensor) -> Int8Weight:
    """Round weights [N, K] symmetrically: the largest magnitude of each output channel becomes 127."""
    exact = weight.float()
    scales = exact.abs().amax(1) / 127
    numbers = exact / torch.where(scales == 0, 1, scales)[:, None]
    return Int8Weight(numbers.round_().to(torch.int8), scales)


def round_to_int4(weight: torch.Tensor) -> Int4Weight:
    """Round weights [N, K] by groups: the weight of largest magnitude of each group becomes -8.

    A weight of the other sign and nearly the same magnitude becomes 7, so its error is up to a whole step.
    """
    exact = pad(weight.float(), (0, -weight.shape[1] % PAIR)).unflatten(1, (-1, 2, GROUP))
    largest = exact.gather(3, exact.abs().argmax(3, keepdim=True))
    scales = (largest / -8).to(torch.bfloat16)
    steps = torch.where(scales == 0, 1, scales).float()
    numbers = (exact / steps).round_().clamp_(-8, 7).to(torch.int8) + 8
    low, high = numbers.to(torch.uint8).unbind(2)
    return Int4Weight(low | high << 4, scales[..., 0].contiguous(), weight.shape[1])


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
