"""Int8 keys and values with their scales, in the layout that kernels read."""

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from sparsekv.kernels.common.launch import power_of_two


@dataclass(frozen=True)
class RowScales:
    """Scales of int8 keys and values.

    A key is its int8 number times its row's scale times its channel's scale, plus its channel's offset. A value is its
    int8 number times its row's scale.

    `rows` [H, M, 2] bfloat16 holds each row's key scale and value scale. They are adjacent, because a kernel can
    prefetch four bytes but not two. `channels` and `offsets` are [H, D]. All are contiguous within a head. `units` [H]
    float32 is the mean value scale of each head. Kernels divide value scales by it, so that they fit in float16, whose
    largest number is 65,504.
    """

    rows: torch.Tensor
    channels: torch.Tensor
    offsets: torch.Tensor
    units: torch.Tensor

    def words(self) -> torch.Tensor:
        """View the two bfloat16 scales of each row as one int32, [H, M]."""
        return self.rows.view(torch.int32)[..., 0]


@dataclass(frozen=True)
class Int8Kernel:
    """Keys and values [H, M, D] int8, contiguous within a head, and their scales."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: RowScales

    def restored(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantise the keys and values to `dtype`."""
        of_keys, of_values = self.scales.rows.to(dtype).split(1, 2)
        channels, offsets = (one[:, None].to(dtype) for one in (self.scales.channels, self.scales.offsets))
        return self.keys.to(dtype) * of_keys * channels + offsets, self.values.to(dtype) * of_values

    def in_words(self) -> "Int8Kernel":
        """View the tensors in the layout that kernels read.

        Two adjacent channels are one int16, [H, M, D / 2]. The two scales of a row are one int32, [H, M]. D must be
        even, which it is in every model with RoPE.
        """
        scales = replace(self.scales, rows=self.scales.words())
        return Int8Kernel(self.keys.view(torch.int16), self.values.view(torch.int16), scales)


Keys: TypeAlias = torch.Tensor | Int8Kernel
"""Keys [H, M, D], either float or int8; the values of an `Int8Kernel` are ignored."""


def pair_block(channels: int) -> int:
    """Return the width, in channels, of a block for a row of channel pairs; a product needs at least 16 pairs."""
    return max(power_of_two(channels), 32)
