"""A model's linear layers for one token on a CPU: by all of its cores, where torch takes one."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

WORTH_IT = 1 << 16
"""Weights of a layer from which on a second core saves more than it takes to hand work to it."""

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""What weights are that lie in memory as they say: others may be quantised, or shared among ranks."""


class OneRowLinear(TorchFunctionMode):
    """Within it, a float32 layer's product with one row is split among torch's threads, by the layer's outputs.

    For one row MKL multiplies on one core, which cannot read memory as fast as all of them: of two, half as fast. All
    else is computed as without it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is linear and not kwargs and len(args) == 3 and (parts := _parts(args[0], args[1])) > 1:
            return _in_parts(*args, parts)
        return func(*args, **(kwargs or {}))


def _parts(row: torch.Tensor, weight: torch.Tensor) -> int:
    """Into how many equal parts the outputs are split; 1 for what is left to torch."""
    if type(weight) not in PLAIN or row.numel() != weight.shape[-1] or weight.numel() < WORTH_IT or weight.dim() != 2:
        return 1
    fits = row.dtype == weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()
    return math.gcd(len(weight), torch.get_num_threads()) if fits else 1


def _in_parts(row: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: int) -> torch.Tensor:
    # As a transposed row: with other strides, which mean the same, MKL takes four times as long.
    column = row.reshape(1, -1).t().expand(parts, -1, 1)
    product = torch.bmm(weight.view(parts, -1, weight.shape[1]), column).view(*row.shape[:-1], -1)
    return product if bias is None else product + bias
