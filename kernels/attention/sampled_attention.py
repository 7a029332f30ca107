"""SampleAttention's scores (arXiv 2406.15486): what a few queries of a chunk, evenly spaced, attend to."""

import torch

from sparsekv.kernels.scores.logits import attention_logits


def spaced_places(total: int, count: int) -> torch.Tensor:
    """[count] int64: places among `total`, at even distances, the last one among them; all where there are no more."""
    count = min(count, total)
    return torch.arange(1, count + 1) * total // count - 1


def sampled_attention(
    query: torch.Tensor, keys: torch.Tensor, softmax_scale: float, softcap: float | None = None
) -> torch.Tensor:
    """Mean probability of each key over queries and the group; the softmax is over these keys alone.

    Args:
        query: [Hk, G, Q, D].
        keys: [Hk, T, D].

    Returns:
        [Hk, T] float32. Allocates the logits [Hk, G, Q, T] float32, twice.
    """
    return attention_logits(query, keys, softmax_scale, softcap).softmax(-1).mean((1, 2))
