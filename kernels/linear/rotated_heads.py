"""Heads of a token's query and key: their RMS norm, if the model has one, and RoPE."""

from collections.abc import Sequence

import torch

from sparsekv.kernels.common.on_gpu import on_gpu
from sparsekv.kernels.linear.quantised import RowNorm, rms_norm


@on_gpu("sparsekv.kernels.linear.rotated_heads_triton:rotated_heads_triton")
def rotated_heads(
    channels: torch.Tensor, queries: int, cos: torch.Tensor, sin: torch.Tensor, norms: Sequence[RowNorm]
) -> torch.Tensor:
    """Rotate a token's query and key heads by RoPE, on a GPU in one launch; return [Hq + Hk, D].

    Args:
        channels: [(Hq + Hk) * D], the query heads and then the key heads.
        queries: Hq.
        cos: cosines [D] of the token's position, one for each channel. A head's first half is rotated with its second.
        sin: sines [D].
        norms: norms over the D channels of query heads and of key heads; none, if the model has none.
    """
    heads = channels.view(-1, len(cos))
    if norms:
        query, key = norms
        heads = torch.cat([rms_norm(heads[:queries], query), rms_norm(heads[queries:], key)])
    first, second = heads.chunk(2, 1)
    return heads * cos + torch.cat([-second, first], 1) * sin
