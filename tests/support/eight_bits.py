"""Random int8 keys and values with scales, and the numbers that they represent."""

from dataclasses import dataclass, fields

import torch

from sparsekv.kernels.common.kernel_inputs import RowScales
from support.random_tensors import normal


@dataclass(frozen=True)
class EightBits:
    """Numbers [H, M, D] int8 with their scales, and the keys and values [H, M, D] float64 that they represent."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: RowScales
    exact_keys: torch.Tensor
    exact_values: torch.Tensor


def eight_bits(seed: int, H: int, M: int, D: int) -> EightBits:
    """Return keys with channels of very different sizes around means that are far from zero, and values of different
    sizes."""
    random = torch.Generator().manual_seed(seed)
    keys, values = (torch.randint(-127, 128, (H, M, D), dtype=torch.int8, generator=random) for _ in range(2))
    sizes = (0.5 * normal(seed + 1, H, M)).exp().bfloat16() / 100
    channels = normal(seed + 2, H, D).exp().bfloat16()
    channels[:, 0] = 0
    offsets = normal(seed + 3, H, D).bfloat16()
    of_values = normal(seed + 4, H, M).exp().bfloat16() / 100
    restored = keys.double() * sizes.double()[..., None] * channels.double()[:, None] + offsets.double()[:, None]
    scales = RowScales(torch.stack([sizes, of_values], -1), channels, offsets, of_values.float().mean(1))
    return EightBits(keys, values, scales, restored, values * of_values.double()[..., None])


def scales_on(scales: RowScales, device: torch.device | str) -> RowScales:
    """Return the scales on a device."""
    return RowScales(*(getattr(scales, one.name).to(device) for one in fields(scales)))
