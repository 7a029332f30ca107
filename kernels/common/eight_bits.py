"""Keys and values in 8 bits, as kernels take them."""

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from sparsekv.kernels.common.launch import power_of_two


@dataclass(frozen=True)
class RowScales:
    """Scales of int8 keys and values: a key is its number times its row's scale times its channel's,
    plus the channel's offset; a value is its number times its row's scale.

    rows [H, M, 2] bfloat16: of rows' keys and of their values, side by side, as a kernel can read four bytes ahead and
    not two; channels, offsets [H, D]. A head's are contiguous. `units` [H] float32 are about as large as a head's
    scales of values, so that float16 holds these over them, up to 65,504.
    """

    rows: torch.Tensor
    channels: torch.Tensor
    offsets: torch.Tensor
    units: torch.Tensor

    def words(self) -> torch.Tensor:
        """Scales [H, M] int32 of rows, of key and value together."""
        return self.rows.view(torch.int32)[..., 0]


@dataclass(frozen=True)
class Int8Kernel:
    """Keys and values [H, M, D] int8, each head's contiguous, and what they mean."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: RowScales

    def restored(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that they mean."""
        of_keys, of_values = self.scales.rows.to(dtype).split(1, 2)
        channels, offsets = (one[:, None].to(dtype) for one in (self.scales.channels, self.scales.offsets))
        return self.keys.to(dtype) * of_keys * channels + offsets, self.values.to(dtype) * of_values

    def in_words(self) -> "Int8Kernel":
        """The same as kernels take them: numbers of two channels as one [H, M, D / 2] int16, scales [H, M] int32 of key
        and value together; D is even, as it is of every model with RoPE."""
        scales = replace(self.scales, rows=self.scales.words())
        return Int8Kernel(self.keys.view(torch.int16), self.values.view(torch.int16), scales)


Keys: TypeAlias = torch.Tensor | Int8Kernel
"""Keys [H, M, D], as they are or in 8 bits, whose values are then not looked at."""


def pair_block(channels: int) -> int:
    """Channels of a block that holds a row's, in pairs: a product takes 16 or more of these."""
    return max(power_of_two(channels), 32)
