"""Attention weights of stored keys, summed over the queries of one KV head."""

import torch

from sparsekv.kernels.common.on_gpu import on_gpu
from sparsekv.kernels.scores.logits import attention_logits

LOGITS_AT_ONCE = 4 * 2**20
"""Number of float32 logits that the plain-torch implementation allocates at a time: 16 MB."""


@on_gpu("sparsekv.kernels.scores.shares_triton:attention_shares_triton")
def attention_shares(
    query: torch.Tensor,
    keys: torch.Tensor,
    own: torch.Tensor,
    seen: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute each stored key's softmax weight, as a weighted sum over queries of one KV head.

    A query's softmax covers all stored keys, and the keys in `own` that the query sees. On a GPU, each of two kernels
    reads the keys once, and no logits are allocated.

    Args:
        query: [R, D].
        keys: [N, D], the stored keys, which all queries see.
        own: [U, D], the keys of the tokens that follow the stored tokens.
        seen: [R] int64; query r sees the first `seen[r]` keys of `own`; at most U.
        weights: [R] float32, the factor of each query in the sum.
        sink: [], the learned logit of the queries' head, which is in each softmax and belongs to no key; None: the head
            has none.

    Returns:
        [N] float32.
    """
    shares, rows = torch.zeros(len(keys), device=keys.device), max(1, LOGITS_AT_ONCE // (len(keys) + len(own)))
    behind = torch.arange(len(own), device=own.device)
    for first in range(0, len(query), rows):
        some = slice(first, first + rows)
        asking = query[None, None, some]
        beside = attention_logits(asking, own[None], softmax_scale, softcap)[0, 0]
        beside = beside.masked_fill(behind >= seen[some, None], -torch.inf)
        logits = [attention_logits(asking, keys[None], softmax_scale, softcap)[0, 0], beside]
        if sink is not None:
            logits.append(sink.float().expand(len(beside), 1))
        shares += weights[some] @ torch.cat(logits, -1).softmax(-1)[:, : len(keys)]
    return shares
