"""Attention of a chunk that has few keys before it."""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from sparsekv.kernels.attention import causal_attention


def chunk_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """`causal_attention` of queries [Hq, Q, D] that are the last of keys, values [Hk, T, D]; returns [Hq, Q, D].

    On a GPU in half precision, where no more keys come before the chunk than are in it, `padded_attention`.
    """
    before = keys.shape[1] - query.shape[1]
    plain = softcap is None and sink_logits is None
    if query.is_cuda and query.dtype != torch.float32 and plain and 0 < before <= query.shape[1]:
        return padded_attention(query, keys, values, softmax_scale)
    return causal_attention(query, keys, values, softmax_scale, softcap, sink_logits=sink_logits)


def padded_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """The same with a query of nothing for each key before the chunk, so that the mask is a square's.

    cuDNN's kernel, on Hopper the fastest that torch has, knows that mask only; what is computed in vain is less than
    what it gains. Copies the queries.
    """
    before = keys.shape[1] - query.shape[1]
    padded = pad(query, (0, 0, before, 0))[None]
    output = scaled_dot_product_attention(
        padded, keys[None], values[None], is_causal=True, scale=softmax_scale, enable_gqa=len(query) != len(keys)
    )
    return output[0, :, before:]
