"""Attention of a prefill chunk to itself and to a few selected earlier keys."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from sparsekv.kernels.attention.attention import causal_attention
from sparsekv.kernels.common.on_gpu import on_gpu
from sparsekv.kernels.scores.logits import attention_logits


@on_gpu("sparsekv.kernels.attention.chunk_rows_triton:chunk_rows_triton")
def chunk_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor, *, padded: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy the chosen rows of keys and values and, after them, the last B rows, those of a chunk of B tokens.

    On a GPU this is one kernel.

    Args:
        query: [Hq, B, D], the chunk's queries.
        keys, values: [Hk, T, D].
        chosen: [Hk, K] int64, indices of the chosen rows of each head, all before the chunk.
        padded: prepend K uninitialised queries, one for each chosen row.

    Returns:
        queries [Hq, K + B, D] if padded, else `query` itself; copies of keys and values [Hk, K + B, D].
    """
    places, chunk = chosen[..., None].expand(-1, -1, keys.shape[2]), query.shape[1]
    of_keys, of_values = (torch.cat([rows.gather(1, places), rows[:, -chunk:]], 1) for rows in (keys, values))
    anything = query.new_empty(len(query), chosen.shape[1], query.shape[2])
    return torch.cat([anything, query], 1) if padded else query, of_keys, of_values


def spaced_places(total: int, count: int) -> torch.Tensor:
    """Return `count` evenly spaced int64 indices below `total`, including the last; all indices if `total` is less."""
    count = min(count, total)
    return torch.arange(1, count + 1) * total // count - 1


def sampled_attention(
    query: torch.Tensor, keys: torch.Tensor, softmax_scale: float, softcap: float | None = None
) -> torch.Tensor:
    """Compute each key's attention probability, averaged over the queries and over the query heads of its KV head.

    The softmax is over these T keys alone, without a causal mask.

    Args:
        query: [Hk, G, Q, D].
        keys: [Hk, T, D].

    Returns:
        [Hk, T] float32. Allocates the logits [Hk, G, Q, T] float32, twice.
    """
    return attention_logits(query, keys, softmax_scale, softcap).softmax(-1).mean((1, 2))


def chunk_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chosen: torch.Tensor,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with a chunk's queries to chosen earlier keys and, causally, to the chunk itself.

    The chunk's keys are the last B of the T keys. On a GPU, `padded_attention` computes this for half precision without
    soft cap or sink logits, if K is at most B.

    Args:
        query: [Hq, B, D].
        keys, values: [Hk, T, D].
        chosen: [Hk, K] int64, indices of the chosen keys of each head, all before the chunk.
        sink_logits: [Hq] learned logits that take part in the softmax and have no value row.

    Returns:
        [Hq, B, D]. Copies the attended rows.
    """
    plain = softcap is None and sink_logits is None
    if query.is_cuda and query.dtype != torch.float32 and plain and chosen.shape[1] <= query.shape[1]:
        return padded_attention(query, keys, values, chosen, softmax_scale)
    query, keys, values = chunk_rows(query, keys, values, chosen)
    return causal_attention(query, keys, values, softmax_scale, softcap, sink_logits=sink_logits)


def padded_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Compute `chunk_attention` with dummy queries in front, so that the mask is square and causal.

    There is one dummy query for each chosen key. cuDNN's kernel is the fastest that torch has on Hopper, but supports
    only square causal masks. This kernel saves more time than the dummy queries cost. The attended rows and the queries
    are copied.
    """
    query, keys, values = chunk_rows(query, keys, values, chosen, padded=True)
    output = scaled_dot_product_attention(
        query[None], keys[None], values[None], is_causal=True, scale=softmax_scale, enable_gqa=len(query) != len(keys)
    )
    return output[0, :, chosen.shape[1] :]
