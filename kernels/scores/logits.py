"""Attention logits, and centroid scores: the estimated attention probability of a cluster's tokens."""

import torch


def attention_logits(
    query: torch.Tensor, keys: torch.Tensor, softmax_scale: float, softcap: float | None = None
) -> torch.Tensor:
    """Logits of grouped queries on keys, in float32, soft-capped where the model does so.

    Args:
        query: [Hk, G, Q, D].
        keys: [Hk, T, D].

    Returns:
        [Hk, G, Q, T] float32. On a CPU, half-precision keys are copied to float32 for it.
    """
    logits = products(query.flatten(1, 2), keys).view(*query.shape[:3], keys.shape[1]) * softmax_scale
    return softcapped(logits, softcap)


def softcapped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Logits of any shape as a model with a soft cap has them (Gemma 2); themselves where there is none."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def products(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Products [Hk, R, T] of queries [Hk, R, D] and keys [Hk, T, D] in float32: in bfloat16 one near 200 would be off
    by up to 0.5."""
    if query.is_cuda and query.dtype == keys.dtype != torch.float32:
        return torch.bmm(query, keys.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(query.float(), keys.float().transpose(1, 2))


def cluster_scores(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    softmax_scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """S_i = exp(q C_i) / sum_j N_j exp(q C_j), averaged over the group (Squeezed Attention, equation 1).

    Args:
        query: [Hk, G, Q, D].
        centroids: [Hk, C, D].
        counts: [Hk, C] int; empty clusters score 0.

    Returns:
        [Hk, Q, C] float32: the estimated attention probability of each token of the cluster.
    """
    logits = attention_logits(query, centroids, softmax_scale, softcap)
    return scores_from_logits(logits, counts[:, None, None, :])


def scores_from_logits(logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """S_i [Hk, Q, C] from logits [Hk, G, Q, C] and counts that broadcast to them."""
    empty = counts == 0
    weights = logits.masked_fill(empty, -torch.inf).softmax(-1).masked_fill(empty, 0)
    # The weights sum to 1 and counts are at least 1, so a sum below 1 means that all clusters are empty.
    return (weights / (counts * weights).sum(-1, keepdim=True).clamp(min=1)).mean(1)
