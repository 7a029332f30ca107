"""Choosing whole clusters by their centroids for one decode step on a CPU, where few operations are what is fast.

The same choice as `cluster_scores` (Squeezed Attention, equation 1), a sort and `fill_budget`, for one query a head. Of
the clusters only so many are ordered as a budget mostly needs, and what depends on no query is computed beforehand.
"""

from dataclasses import dataclass

import torch

from sparsekv.kernels.scores.logits import attention_logits

SPARE = 32


def logs_and_shares(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of counts [H, C] int the logarithms, minus infinity for none, and 1 / counts, 0 for none; both [H, C] float32."""
    return counts.float().log(), counts.float().reciprocal().masked_fill(counts == 0, 0)


@dataclass(frozen=True)
class CountedClusters:
    """C clusters of each of H heads: centroids [H, C, D], counts [H, C] int of their tokens, what `logs_and_shares`
    says of these, as [H, 1, C] and [H, C], and the tokens of each head."""

    centroids: torch.Tensor
    counts: torch.Tensor
    log_counts: torch.Tensor
    shares: torch.Tensor
    tokens: int

    def expected(self, budget: int) -> int:
        """How many of the best clusters nearly always hold a budget: twice as many as of mean size."""
        C = self.counts.shape[1]
        return min(C, SPARE + 2 * C * budget // max(1, self.tokens))


@dataclass(frozen=True)
class BestClusters:
    """R of C clusters of each of H heads that fill a budget, best first; of clusters that agree the order is any.

    logits [H, G, C] float32 of the query on all centroids, plus the logarithms of the counts; clusters [H, R] int64,
    their numbers; lengths [H, R] int64, the tokens to take of each, left [H, R] int64, those that are not taken.
    """

    logits: torch.Tensor
    clusters: torch.Tensor
    lengths: torch.Tensor
    left: torch.Tensor

    def log_share_left(self, shares: torch.Tensor) -> torch.Tensor:
        """[H, 1, C] float32: the logarithm of the share of each cluster's tokens that is not taken, given `shares` of
        the clusters; 0 for an empty one that was not looked at, minus infinity for one that was."""
        left = shares.gather(1, self.clusters).mul_(self.left).log_()
        return torch.zeros_like(shares).scatter_(1, self.clusters, left).unsqueeze(1)


def best_clusters(
    query: torch.Tensor, clusters: CountedClusters, budget: int, softmax_scale: float, softcap: float | None = None
) -> BestClusters:
    """The best clusters by S_i averaged over the group: whole ones, then the start of the one that passes the budget.

    Args:
        query: [H, G, D].
        budget: tokens to take of each head, which has as many at least.

    Returns:
        See `BestClusters`. Allocates the logits twice.
    """
    if softcap is None and query.dtype == clusters.centroids.dtype == torch.float32:
        centroids = clusters.centroids.transpose(1, 2)
        logits = torch.baddbmm(clusters.log_counts, query, centroids, alpha=softmax_scale)
    else:
        logits = attention_logits(query.unsqueeze(2), clusters.centroids, softmax_scale, softcap).squeeze(2)
        logits = logits + clusters.log_counts
    # Of N_i S_i, a cluster's share of the attention; a mean over the group would order them as this sum does.
    scores = logits.softmax(-1).sum(1).mul_(clusters.shares)
    several = clusters.expected(budget)
    while True:
        best = scores.topk(several).indices
        counts = clusters.counts.gather(1, best).long()
        ends = counts.cumsum(1)
        if several == scores.shape[1] or min(ends[:, -1].tolist()) >= budget:
            break
        several = scores.shape[1]
    left = torch.minimum((ends - budget).clamp_(min=0), counts)
    return BestClusters(logits, best, counts - left, left)
