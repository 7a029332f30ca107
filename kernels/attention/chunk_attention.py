"""Attention of a chunk to few of the keys before it."""

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
    """Attention of a chunk's queries, which are the last of the keys, to chosen keys before it and, causally, to it.

    On a GPU in half precision, where no more keys are chosen than the chunk has, `padded_attention`.

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
    """The same with a query of anything for each key that is chosen, so that the mask is a square's.

    cuDNN's kernel, on Hopper the fastest that torch has, knows that mask only; what is computed in vain is less than
    what it gains. Copies the queries too.
    """
    query, keys, values = chunk_rows(query, keys, values, chosen, padded=True)
    output = scaled_dot_product_attention(
        query[None], keys[None], values[None], is_causal=True, scale=softmax_scale, enable_gqa=len(query) != len(keys)
    )
    return output[0, :, chosen.shape[1] :]
