"""Attention logits, softmax with its log-sum-exp, scores of centroids and keys, and the choice of the best scores."""

import numpy as np
import torch
from torch.nn.functional import normalize


def softmax_with_logsumexp(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the softmax over the last axis, and the log-sum-exp from the largest weight and its logit.

    Args:
        logits: [..., T] float32, with at least one logit above minus infinity in each row.

    Returns:
        weights [..., T] and log-sum-exps [...].
    """
    weights = logits.softmax(-1)
    return weights, logits.amax(-1) - weights.amax(-1).log()


def softmax_beside(logits: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """Compute the weights [..., T] of logits [..., T] in a softmax that also includes other logits.

    `beside` [...] is the log-sum-exp of the other logits. Allocates a copy of the logits.
    """
    return torch.cat([logits, beside[..., None]], -1).softmax(-1)[..., :-1]


def best_tokens(scores: torch.Tensor, tokens: int) -> torch.Tensor:
    """Choose the `tokens` highest of scores [..., M] float32; return their indices [..., tokens] int64 in any order.

    On a CPU, numpy's introselect is used. Torch's topk sorts, and takes five times as long for M of 32,768 or more.
    """
    if scores.device.type != "cpu":
        return scores.topk(tokens, -1).indices
    left_out = scores.shape[-1] - tokens
    return torch.from_numpy(np.argpartition(scores.numpy(), left_out, axis=-1)[..., left_out:])


def keydiff_scores(keys: torch.Tensor) -> torch.Tensor:
    """Compute minus the cosine between each key and the anchor, which is the mean of the normalised keys.

    Args:
        keys: [Hk, T, D].

    Returns:
        [Hk, T] float32. Allocates up to two float32 copies of the keys.
    """
    directions = normalize(keys.float(), dim=-1)
    anchor = normalize(directions.mean(1, keepdim=True), dim=-1)
    return -(directions @ anchor.transpose(1, 2))[..., 0]


def attention_logits(
    query: torch.Tensor, keys: torch.Tensor, softmax_scale: float, softcap: float | None = None
) -> torch.Tensor:
    """Compute the logits of grouped queries for keys in float32, with the soft cap if there is one.

    Args:
        query: [Hk, G, Q, D].
        keys: [Hk, T, D].

    Returns:
        [Hk, G, Q, T] float32. Copies half-precision keys to float32, except on a GPU if the query has the same dtype.
    """
    logits = products(query.flatten(1, 2), keys).view(*query.shape[:3], keys.shape[1]) * softmax_scale
    return softcapped(logits, softcap)


def softcapped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Apply a model's soft cap (Gemma 2) to logits of any shape; without a soft cap, return them unchanged."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def products(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Compute the products [Hk, R, T] of queries [Hk, R, D] and keys [Hk, T, D] in float32.

    Rounded to bfloat16, a product near 200 would have an error of up to 0.5.
    """
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
    """Compute S_i = exp(q C_i) / sum_j N_j exp(q C_j), averaged over the group (Squeezed Attention, equation 1).

    C_i is the centroid of cluster i and N_i its token count. q C_i is the scaled and soft-capped logit.

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
    """Compute the scores S_i [Hk, Q, C] of `cluster_scores` from logits [Hk, G, Q, C].

    `counts` broadcasts to the logits.
    """
    empty = counts == 0
    weights = logits.masked_fill(empty, -torch.inf).softmax(-1).masked_fill(empty, 0)
    # The weights sum to 1, and non-empty clusters have counts of at least 1. A sum below 1 means that all are empty.
    return (weights / (counts * weights).sum(-1, keepdim=True).clamp(min=1)).mean(1)
