"""Choosing whole clusters by their centroids for one decode step, to a budget of tokens.

The same choice as `cluster_scores` (Squeezed Attention, equation 1), a sort and `fill_budget`, for one query a head,
and with what the attention that follows needs: logits, runs, and how many tokens each centroid has left to stand for.
"""

from dataclasses import dataclass

import torch

from sparsekv.kernels.lookup import attention_logits, scores_from_logits
from sparsekv.kernels.runs import fill_budget

# A score is compared by its exponent and 7 bits of its fraction: as much as bfloat16 keeps of the keys it comes from.
SCORE_BITS = 7
# No more than `budget` tokens have a score above 1 / budget, and with the best of a head's tokens above that divided by
# 2 ** 16, all others together are nothing: it is only between these that clusters are told apart.
EXPONENT_BITS = 4
TOKEN_BITS = 32 - EXPONENT_BITS - SCORE_BITS
MOST_TOKENS = 2**TOKEN_BITS - 1


def least_rank(budget: int) -> int:
    """What is subtracted from a float32's leading bits to make ranks of scores: the last one is the first above 0."""
    exponent = 1 - max(budget, 1).bit_length()
    return (127 + exponent - int(2**EXPONENT_BITS)) << SCORE_BITS


@dataclass(frozen=True)
class ClusterChoice:
    """What was chosen of C clusters of each of H heads.

    logits [H, G, C or more] float32 of the query on the centroids, minus infinity on empty clusters and past the last;
    lengths [H, C] int32, tokens taken of each cluster, and ends [H, C] int32, their running sum; log_left [H, C or
    more] float32, the logarithm of how many tokens of each were not taken, minus infinity for none.
    """

    logits: torch.Tensor
    lengths: torch.Tensor
    ends: torch.Tensor
    log_left: torch.Tensor


def choose_clusters(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ClusterChoice:
    """The best clusters by S_i averaged over the group: whole ones, then the start of the one that passes the budget.

    Of scores that agree to one part in 128 the lower number is first. On a GPU two kernels, no synchronisation, and
    shapes that depend on no data.

    Args:
        query: [H, G, D]; centroids: [H, C, D]; counts: [H, C] int, the tokens of each cluster.
        budget: tokens to take of each head, which has `MOST_TOKENS` (2,097,151) at most.

    Returns:
        See `ClusterChoice`. Allocates the logits and three tensors [H, C].
    """
    if query.is_cuda:
        from sparsekv.kernels.cluster_choice_triton import choose_clusters_triton

        with torch.cuda.device(query.device):  # Triton launches on the current one, which may be another
            return choose_clusters_triton(query, centroids, counts, budget, softmax_scale, softcap)
    return choose_clusters_reference(query, centroids, counts, budget, softmax_scale, softcap)


def choose_clusters_reference(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ClusterChoice:
    """`choose_clusters` in plain torch."""
    logits = attention_logits(query[:, :, None], centroids, softmax_scale, softcap)[:, :, 0]
    logits = logits.masked_fill(counts[:, None] == 0, -torch.inf)
    scores = scores_from_logits(logits[:, :, None], counts[:, None, None])[:, 0]
    leading = scores.view(torch.int32) >> (23 - SCORE_BITS)
    ranks = (leading - least_rank(budget)).clamp(0, 2 ** (EXPONENT_BITS + SCORE_BITS) - 1)
    order = ranks.argsort(dim=-1, descending=True, stable=True)
    taken = fill_budget(counts.gather(-1, order).int(), budget).int()
    lengths = torch.zeros_like(taken).scatter_(-1, order, taken)
    return ClusterChoice(logits, lengths, lengths.cumsum(-1, dtype=torch.int32), (counts - lengths).float().log())
