"""Warm-up of a process's first GPU kernels, so that their one-time costs overlap with other waiting."""

import torch
from torch.nn import functional


def make_first_calls(device: torch.device, dtype: torch.dtype) -> None:
    """Call, on tiny tensors on a GPU, the operations of a model's first token and of an index's checks.

    Torch loads each kernel at its first call. On an H200, loading the kernels of a layer and of cuBLAS takes 0.5 s in
    total. The first Triton kernel of a process takes half a second more, because Triton hashes its own source to find
    compiled kernels in its cache.

    Args:
        dtype: the model's dtype, because torch has separate kernels for each dtype.
    """
    with torch.cuda.device(device), torch.inference_mode():
        _decoder_layer(device, dtype)
        _checks(device, dtype)
        _triton(device)


def _decoder_layer(device: torch.device, dtype: torch.dtype) -> None:
    """Call the operations around a decoder layer's attention that most model families have."""
    weights = torch.ones(64, 64, dtype=dtype, device=device)
    hidden = functional.embedding(torch.zeros(1, 1, dtype=torch.int64, device=device), weights)
    exact = hidden.float()
    normed = weights[0] * (exact * (exact.pow(2).mean(-1, keepdim=True) + 1).rsqrt()).to(dtype)
    angles = torch.cat([exact[:, :, :1] @ exact[:, :, :32]] * 2, -1)
    query = functional.linear(normed, weights)
    rotated = torch.cat([-query[..., 32:], query[..., :32]], -1)
    query = query * angles.cos().to(dtype) + rotated * angles.sin().to(dtype)
    gated = functional.silu(query) * functional.gelu(query, approximate="tanh")
    (hidden + functional.linear(gated, weights)).float().cpu()


def _checks(device: torch.device, dtype: torch.dtype) -> None:
    """Call the operations of `check_values` in `formats.index.layout`, on a token order of two tokens."""
    numbers = torch.ones(2, 2, dtype=dtype, device=device)
    whole = torch.stack(torch.aminmax(numbers)).isfinite().all()
    order = torch.zeros(2, 2, dtype=torch.int32, device=device)
    least, most = torch.aminmax(order.long())
    seen = torch.zeros(2, 2, dtype=torch.bool, device=device).scatter_(1, order.long().clamp(0, 1), True)
    wrong = (least < 0) | (most >= 2) | ~seen.all() | (order.sum(1) != 2).any() | (order.diff(dim=1) != 0).any()
    torch.stack([wrong, ~whole]).tolist()


def _triton(device: torch.device) -> None:
    from sparsekv.kernels.common.run_rows_triton import list_rows  # imported here, because a CPU needs no Triton

    one = torch.ones(1, 1, dtype=torch.int32, device=device)
    list_rows(one, one, torch.empty_like(one), 1)
