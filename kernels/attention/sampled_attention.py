"""SampleAttention's scores (arXiv 2406.15486): mean attention of a few evenly spaced queries of a chunk."""

import torch

from sparsekv.kernels.scores.logits import attention_logits


def spaced_places(total: int, count: int) -> torch.Tensor:
    """[count] int64: evenly spaced indices below `total`, including the last; all indices if `total` is smaller."""
    count = min(count, total)
    return torch.arange(1, count + 1) * total // count - 1


def sampled_attention(
    query: torch.Tensor, keys: torch.Tensor, softmax_scale: float, softcap: float | None = None
) -> torch.Tensor:
    """Mean attention probability of each key over queries and group; the softmax is over these keys alone.

    Args:
        query: [Hk, G, Q, D].
        keys: [Hk, T, D].

    Returns:
        [Hk, T] float32. Allocates the logits [Hk, G, Q, T] float32, twice.
    """
    return attention_logits(query, keys, softmax_scale, softcap).softmax(-1).mean((1, 2))
