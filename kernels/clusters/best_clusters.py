"""Choosing whole clusters by their centroids for one decode step on a CPU, in few torch operations.

The same choice as `cluster_scores` (Squeezed Attention, equation 1), a sort and `fill_budget`, for one query a head.
Only as many clusters are sorted as a budget usually needs; what does not depend on the query is computed beforehand.
"""

from dataclasses import dataclass

import torch

from sparsekv.kernels.scores.logits import attention_logits

SPARE = 32  # clusters to sort beyond twice the number that a budget has on average


def logs_and_shares(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log(counts), minus infinity for 0, and 1 / counts, 0 for 0, of counts [H, C] int; both [H, C] float32."""
    return counts.float().log(), counts.float().reciprocal().masked_fill(counts == 0, 0)


@dataclass(frozen=True)
class CountedClusters:
    """C clusters of each of H heads: centroids [H, C, D], counts [H, C] int of their tokens, log_counts [H, 1, C] and
    shares [H, C] from `logs_and_shares`, and the number of tokens of each head."""

    centroids: torch.Tensor
    counts: torch.Tensor
    log_counts: torch.Tensor
    shares: torch.Tensor
    tokens: int

    def expected(self, budget: int) -> int:
        """Number of best clusters that nearly always have a budget of tokens: twice as many as at mean size."""
        C = self.counts.shape[1]
        return min(C, SPARE + 2 * C * budget // max(1, self.tokens))


@dataclass(frozen=True)
class BestClusters:
    """R of C clusters of each of H heads that fill a budget, best first; equal ones are in any order.

    logits [H, G, C] float32 of the query on all centroids, plus the log counts; clusters [H, R] int64, the indices of
    the best; lengths [H, R] int64, the tokens to take of each; left [H, R] int64, the tokens that are not taken.
    """

    logits: torch.Tensor
    clusters: torch.Tensor
    lengths: torch.Tensor
    left: torch.Tensor

    def log_share_left(self, shares: torch.Tensor) -> torch.Tensor:
        """Log of the share of each cluster's tokens that is not taken, [H, 1, C] float32, given the clusters' `shares`;
        for an empty cluster 0, or minus infinity if it is one of the R."""
        left = shares.gather(1, self.clusters).mul_(self.left).log_()
        return torch.zeros_like(shares).scatter_(1, self.clusters, left).unsqueeze(1)


def best_clusters(
    query: torch.Tensor, clusters: CountedClusters, budget: int, softmax_scale: float, softcap: float | None = None
) -> BestClusters:
    """The best clusters by S_i averaged over the group: whole ones, then the start of the one that passes the budget.

    Args:
        query: [H, G, D].
        budget: tokens to take in each head, at most as many as it has.

    Returns:
        See `BestClusters`. Allocates the logits twice.
    """
    if softcap is None and query.dtype == clusters.centroids.dtype == torch.float32:
        centroids = clusters.centroids.transpose(1, 2)
        logits = torch.baddbmm(clusters.log_counts, query, centroids, alpha=softmax_scale)
    else:
        logits = attention_logits(query.unsqueeze(2), clusters.centroids, softmax_scale, softcap).squeeze(2)
        logits = logits + clusters.log_counts
    # The softmax gives N_i S_i, so it is divided by N_i; a sum over the group orders clusters like the mean.
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
