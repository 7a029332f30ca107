"""Attention of many queries to contiguous rows by FlashAttention-3, an optional package for Hopper GPUs."""

from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from sparsekv.kernels.common.on_gpu import on_gpu
from sparsekv.kernels.scores.logits import attention_logits

MODULES = ("flash_attn_interface", "fa3_fwd_interface")
"""Modules of FlashAttention-3's forward pass: of its own repository, and of the package fa3-fwd on PyPI."""
FEWEST_QUERIES, FEWEST_ROWS = 128, 4096
"""Smallest numbers of queries and of rows of a head for which FlashAttention-3 is used. With fewer queries it is no
faster than our own kernel. With fewer rows its additional launch takes more time than it saves."""


@lru_cache(1)
def flash_attention_3() -> Any:
    """Return the installed module of FlashAttention-3, or None if none of MODULES can be imported."""
    return next(filter(None, map(_imported, MODULES)), None)


def _imported(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except (ImportError, OSError):  # a package of another version of torch cannot load its library
        return None


def takes_rows(query: torch.Tensor, keys: torch.Tensor, softcap: float | None) -> bool:
    """Whether FlashAttention-3 is used for queries [Hk, G, B, D] and keys [Hk, E, D]."""
    if query.shape[1] * query.shape[2] < FEWEST_QUERIES or keys.shape[1] < FEWEST_ROWS:
        return False
    return query.dtype == keys.dtype and _runs(query.device, query.dtype, query.shape[3], capped=softcap is not None)


@lru_cache
def _runs(device: torch.device, dtype: torch.dtype, channels: int, *, capped: bool) -> bool:
    """Whether the installed package has a kernel for a GPU, dtype and head size. Some packages lack some kernels."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9 or flash_attention_3() is None:
        return False
    rows = torch.zeros(1, 1, 1, channels, dtype=dtype, device=device)
    try:
        partial_attention_3(rows, rows[0], rows[0], 1.0, 1.0 if capped else None)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return False
    return True


@on_gpu("sparsekv.kernels.attention.flash_attention:partial_attention_3")
def partial_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with each query to all rows of its head.

    On a GPU this is FlashAttention-3, which must be installed and support the tensors (`takes_rows`). It allocates its
    partial results, whose size depends on the queries and not on the rows. The plain-torch implementation allocates all
    logits.

    Args:
        query: [Hk, G, B, D].
        keys, values: [Hk, E, D] with contiguous channels.

    Returns:
        The output [Hk, B, G, D] in the query's dtype, with contiguous groups and channels, and the log-sum-exp of the
        logits [Hk, G, B] float32, contiguous.
    """
    logits = attention_logits(query, keys, softmax_scale, softcap)
    output = logits.softmax(-1).to(values.dtype) @ values[:, None]
    return output.to(query.dtype).transpose(1, 2).contiguous(), logits.logsumexp(-1)


def partial_attention_3(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `partial_attention` by FlashAttention-3."""
    Hk, G, B, _ = query.shape
    output, logsumexp, *_ = flash_attention_3().flash_attn_with_kvcache(
        query.permute(2, 0, 1, 3).flatten(1, 2)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        softmax_scale=softmax_scale,
        softcap=softcap or 0.0,
        return_softmax_lse=True,
    )
    return output[0].view(B, Hk, G, -1).transpose(0, 1), logsumexp[0].view(Hk, G, B)
