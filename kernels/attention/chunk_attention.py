"""Attention of a prefill chunk to itself and to a few chosen keys before it."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from sparsekv.kernels.attention.attention import causal_attention
from sparsekv.kernels.attention.chunk_rows import chunk_rows


def chunk_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chosen: torch.Tensor,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a chunk's queries to chosen keys before the chunk and, causally, to the chunk, the last B keys.

    On a GPU, for half precision without soft cap or sink logits and for K of at most B, uses `padded_attention`.

    Args:
        query: [Hq, B, D]; keys, values: [Hk, T, D]; chosen: [Hk, K] int64, rows of each head before the chunk.
        sink_logits: [Hq].

    Returns:
        [Hq, B, D]. Copies the rows that are attended.
    """
    plain = softcap is None and sink_logits is None
    if query.is_cuda and query.dtype != torch.float32 and plain and chosen.shape[1] <= query.shape[1]:
        return padded_attention(query, keys, values, chosen, softmax_scale)
    query, keys, values = chunk_rows(query, keys, values, chosen)
    return causal_attention(query, keys, values, softmax_scale, softcap, sink_logits=sink_logits)


def padded_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """`chunk_attention` with one dummy query for each chosen key in front, so that the mask is square and causal.

    cuDNN's kernel, the fastest of torch's on Hopper, supports that mask alone, and gains more than the dummy queries
    cost. Copies the queries too.
    """
    query, keys, values = chunk_rows(query, keys, values, chosen, padded=True)
    output = scaled_dot_product_attention(
        query[None], keys[None], values[None], is_causal=True, scale=softmax_scale, enable_gqa=len(query) != len(keys)
    )
    return output[0, :, chosen.shape[1] :]
