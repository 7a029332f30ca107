"""Attention of several sequences to one shared document, by kernels that read shared rows once and in place."""

from collections.abc import Sequence

import torch

from sparsekv.kernels.attention.attention import OwnRows, Segment, own_logits, shared_attention
from sparsekv.kernels.attention.types import Centroids, RunRows
from sparsekv.kernels.common.on_gpu import on_gpu
from sparsekv.kernels.scores.logits import attention_logits


@on_gpu("sparsekv.kernels.attention.shared_decode_triton:exact_logsumexp_triton")
def exact_logsumexp(
    query: torch.Tensor,
    keys: torch.Tensor,
    own: OwnRows,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the log-sum-exp of each query's logits for shared keys, its own sequence's keys and learned sinks.

    On a GPU this is one launch that copies no keys. The plain-torch implementation copies a sequence's keys for each of
    its tokens.

    Args:
        query: [Hk, G, B, D] of B tokens.
        keys: [Hk, E, D]; a head's rows are contiguous.
        own: rows of each token's own sequence, for the B tokens.
        sink_logits: [Hk, G] learned logits without values (GPT-OSS).

    Returns:
        [Hk, G, B] float32; minus infinity if a query has no logits.
    """
    shared = attention_logits(query, keys, softmax_scale, softcap)
    total = torch.cat([shared, own_logits(query, own, softmax_scale, softcap)], -1).logsumexp(-1)
    return total if sink_logits is None else torch.logaddexp(total, sink_logits[..., None].float())


@on_gpu("sparsekv.kernels.attention.shared_decode_triton:shared_decode_triton")
def shared_decode(
    query: torch.Tensor,
    runs: RunRows,
    exact: tuple[torch.Tensor, torch.Tensor],
    centroids: Sequence[Centroids],
    own: OwnRows,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with each query to shared chosen rows, exact rows and centroids, and to its own sequence, in one softmax.

    Exact rows are read without row indices: the document's first tokens (sinks) and last tokens (tail), or, for dense
    attention, all of its rows. On a GPU there are three launches, and a call of FlashAttention-3 if it takes the exact
    rows. There is no synchronisation, and no shape depends on data. The plain-torch implementation copies the rows.

    Args:
        query: [Hk, G, B, D] of B tokens.
        runs: chosen rows that all tokens attend to, as single rows (`ends` is None).
        exact: keys and values [Hk, E, D] that all tokens attend to. The rows of a head are contiguous; heads may have
            any stride.
        centroids: at most one set of centroids that all tokens attend to.
        own: rows of each token's own sequence, for the B tokens. On a GPU, keys and values have equal strides within
            `own`, within `runs` and within `exact`.
        sink_logits: [Hk, G] learned logits without values (GPT-OSS).

    Returns:
        [Hk, G, B, D] in the query's dtype.
    """
    assert len(centroids) <= 1
    rows = runs.starts[:, : runs.capacity].long()
    used = rows.new_full(rows.shape[:1], runs.capacity) if runs.used is None else runs.used
    valid = torch.arange(rows.shape[1], device=rows.device) < used[:, None]
    of_rows = runs.gathered(torch.where(valid, rows, 0), torch.promote_types(query.dtype, torch.float32))
    chosen = Segment(*of_rows, valid[:, None, None])
    stood = [
        Segment(part.keys, part.values, bias=part.log_counts[:, None, None, : part.keys.shape[1]]) for part in centroids
    ]
    return shared_attention(query, [chosen, Segment(*exact), *stood], own, softmax_scale, softcap, sink_logits)
