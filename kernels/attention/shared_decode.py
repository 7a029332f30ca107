"""Attention of several sequences over one document by kernels that read shared rows once and in place."""

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
    """The log-sum-exp of each query's logits on shared keys, on its own rows, and of learned sinks.

    On a GPU one launch, and no rows are copied.

    In plain torch it copies each sequence's rows.

    Args:
        query: [Hk, G, B, D] of B tokens.
        keys: [Hk, E, D]; a head's rows are contiguous.
        own: rows that each of the B tokens attends to alone.
        sink_logits: [Hk, G] learned logits without values (GPT-OSS).

    Returns:
        [Hk, G, B] float32; minus infinity for nothing.
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
    """One softmax for each query, over shared runs, exact rows and centroids, and over the rows of its own sequence.

    On a GPU three launches, no synchronisation, and no shapes that depend on data.

    In plain torch it gathers the rows.

    Args:
        query: [Hk, G, B, D] of B tokens.
        runs: single rows.
        exact: keys and values [Hk, E, D] that all attend to; a head's rows are contiguous, heads need not be.
        centroids: at most one set of centroids that all attend to.
        own: rows that each of the B tokens attends to alone.
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
