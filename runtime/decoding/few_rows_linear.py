"""A model's linear layers for few tokens on a CPU: by all of its cores, also where torch takes one."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from sparsekv.runtime.decoding.compiled import is_compiled

WORTH_IT = 1 << 16
"""Weights of a layer from which on a second core saves more than it takes to hand work to it."""

GAIN = 1.8
"""How many times as fast the split must be for torch's product to be replaced: it is three times, or half as fast."""

FEW = 4
"""Rows up to which it makes a step faster: one by half or more, four by a tenth, eight not at all."""

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""What weights are that lie in memory as they say: others may be quantised, or shared among ranks."""


class FewRowsLinear(TorchFunctionMode):
    """Within it, a float32 layer's product with few rows is split among torch's threads, by the layer's outputs.

    On AMD's processors MKL multiplies few rows on one core, which cannot read memory as fast as all of them: of two, a
    third as fast. On Intel's it takes all of them. What is no such product is computed as without it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is linear and not kwargs and len(args) == 3 and (parts := _parts(*args)) > 1:
            return _in_parts(*args, parts)
        return func(*args, **(kwargs or {}))


def all_cores(model: PreTrainedModel) -> AbstractContextManager[object]:
    """The context for a model's steps; nothing on a GPU, where torch's compiler has them, or where torch's own product
    is as fast. Not to be held while a generator waits: it is the thread's."""
    split = model.device.type == "cpu" and not is_compiled(model) and split_pays(torch.get_num_threads())
    return FewRowsLinear() if split else nullcontext()


@cache
def split_pays(threads: int) -> bool:
    """Whether this machine's processor multiplies few rows faster when they are split among so many threads.

    Measured, once, on 4 MiB of weights in some 2 ms: what MKL does depends on the processor and on its own version.
    """
    if threads == 1:
        return False
    weight, row = torch.ones(-(-1024 // threads) * threads, 1024), torch.ones(1, 1024)
    whole, split = _fastest(lambda: linear(row, weight), lambda: _in_parts(row, weight, None, threads))
    return whole > GAIN * split


def _fastest(*products: Callable[[], torch.Tensor]) -> list[float]:
    """Seconds of the fastest of eight of each, taken in turn: what else runs disturbs them alike."""
    best = [inf] * len(products)
    for _ in range(8):
        for number, product in enumerate(products):
            started = perf_counter()
            product()
            best[number] = min(best[number], perf_counter() - started)
    return best


def _parts(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    """Into how many equal parts the outputs are split; 1 for what is left to torch."""
    if type(weight) not in PLAIN or weight.numel() < WORTH_IT or weight.dim() != 2:
        return 1
    few = rows.shape[-1:] == weight.shape[1:] and 0 < rows.numel() <= FEW * weight.shape[1]
    fits = weight.device.type == "cpu" and weight.is_contiguous()
    if not few or not fits or any(one is not None and one.dtype != torch.float32 for one in (rows, weight, bias)):
        return 1
    return max(parts for parts in range(1, torch.get_num_threads() + 1) if len(weight) % parts == 0)


def _in_parts(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: int) -> torch.Tensor:
    # As transposed rows: with other strides, which mean the same, MKL takes four times as long.
    columns = rows.reshape(-1, weight.shape[1]).t().expand(parts, -1, -1)
    product = torch.bmm(weight.view(parts, -1, weight.shape[1]), columns).view(len(weight), -1)
    outputs = product.t().reshape(*rows.shape[:-1], -1)
    return outputs if bias is None else outputs + bias
