"""Choosing whole clusters by their centroids for one decode step, to a budget of tokens.

The same choice as `cluster_scores` (Squeezed Attention, equation 1), a sort and `fill_budget`, for one query a head,
and with what the attention that follows needs: logits, runs, and how many tokens each centroid has left to stand for.
Down two levels the first choice is of clusters whose children are looked at, the second one is among those.
"""

from dataclasses import dataclass

import torch

from sparsekv.kernels.lookup import attention_logits, scores_from_logits
from sparsekv.kernels.runs import expand_runs, fill_budget

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


@dataclass(frozen=True)
class ListedChoice:
    """What was chosen of the clusters in S slots of each of H heads: `ClusterChoice` of these, and of each slot which
    cluster it is, clusters [H, S or more] int32, 0 where it is none, and that one's first row, starts [H, S] int32."""

    chosen: ClusterChoice
    clusters: torch.Tensor
    starts: torch.Tensor


def choose_clusters(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ClusterChoice:
    """The best clusters by S_i averaged over the group: whole ones, then the start of the one that passes the budget.

    Of scores that agree to one part in 128 the lower number is first. On a GPU two kernels, four where there are many
    clusters, no synchronisation, and shapes that depend on no data.

    Args:
        query: [H, G, D]; centroids: [H, C, D]; counts: [H, C] int, the tokens of each cluster.
        budget: tokens to take of each head, which has `MOST_TOKENS` (2,097,151) at most.

    Returns:
        See `ClusterChoice`. Allocates the logits and four tensors [H, C].
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
    logits, scores = _scored(query, centroids, counts, softmax_scale, softcap)
    return _best(logits, scores, counts, budget)


def _scored(
    query: torch.Tensor, centroids: torch.Tensor, counts: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [H, G, C] and scores [H, C] of clusters."""
    logits = attention_logits(query[:, :, None], centroids, scale, softcap)[:, :, 0]
    logits = logits.masked_fill(counts[:, None] == 0, -torch.inf)
    return logits, scores_from_logits(logits[:, :, None], counts[:, None, None])[:, 0]


def _best(logits: torch.Tensor, scores: torch.Tensor, counts: torch.Tensor, budget: int) -> ClusterChoice:
    order = _ranked(scores, budget)
    taken = fill_budget(counts.gather(-1, order).int(), budget).int()
    return _choice(logits, torch.zeros_like(taken).scatter_(-1, order, taken), counts)


def _ranked(scores: torch.Tensor, budget: int) -> torch.Tensor:
    """[H, C] numbers of clusters by rank, the highest first."""
    ranks = (scores.view(torch.int32) >> (23 - SCORE_BITS)) - least_rank(budget)
    return ranks.clamp(0, 2 ** (EXPONENT_BITS + SCORE_BITS) - 1).argsort(dim=-1, descending=True, stable=True)


def _choice(logits: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor) -> ClusterChoice:
    return ClusterChoice(logits, lengths, lengths.cumsum(-1, dtype=torch.int32), (counts - lengths).float().log())


def open_clusters(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    children: torch.Tensor,
    wanted: int,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ClusterChoice:
    """The best clusters, whole, until they have so many children and hold so many tokens.

    Args:
        query: [H, G, D]; centroids: [H, C, D]; counts, children: [H, C] int32, of tokens and of clusters a level below.
        wanted: children of each head; budget: tokens.

    Returns:
        a choice whose lengths and ends are numbers of children.
    """
    if query.is_cuda:
        from sparsekv.kernels.cluster_choice_triton import open_clusters_triton

        with torch.cuda.device(query.device):
            return open_clusters_triton(query, centroids, counts, children, wanted, budget, softmax_scale, softcap)
    return open_clusters_reference(query, centroids, counts, children, wanted, budget, softmax_scale, softcap)


def open_clusters_reference(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    children: torch.Tensor,
    wanted: int,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ClusterChoice:
    """`open_clusters` in plain torch."""
    logits, scores = _scored(query, centroids, counts, softmax_scale, softcap)
    order = _ranked(scores, budget)
    opened = until_enough(counts.gather(-1, order), children.gather(-1, order), wanted, budget)
    opened = torch.zeros_like(opened).scatter_(-1, order, opened)
    lengths = (children * opened).int()
    left = (counts * ~opened).float().log()
    return ClusterChoice(logits, lengths, lengths.cumsum(-1, dtype=torch.int32), left)


def until_enough(counts: torch.Tensor, children: torch.Tensor, wanted: int, budget: int) -> torch.Tensor:
    """Which clusters to open, [..., C] bool, of counts and children [..., C] in order: until both are reached."""
    held, had = counts.cumsum(-1) - counts, children.cumsum(-1) - children
    return (held < budget) | (had < wanted)


def keep_clusters(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    threshold: float,
    softmax_scale: float,
    softcap: float | None = None,
) -> ClusterChoice:
    """All clusters whose S_i, averaged over the group, reaches a threshold; like `choose_clusters` in all else."""
    if query.is_cuda:
        from sparsekv.kernels.cluster_choice_triton import keep_clusters_triton

        with torch.cuda.device(query.device):
            return keep_clusters_triton(query, centroids, counts, threshold, softmax_scale, softcap)
    return keep_clusters_reference(query, centroids, counts, threshold, softmax_scale, softcap)


def keep_clusters_reference(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    threshold: float,
    softmax_scale: float,
    softcap: float | None = None,
) -> ClusterChoice:
    """`keep_clusters` in plain torch."""
    logits, scores = _scored(query, centroids, counts, softmax_scale, softcap)
    return _choice(logits, (counts * (scores >= threshold)).int(), counts)


def choose_listed(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    first_row: torch.Tensor,
    runs: tuple[torch.Tensor, torch.Tensor],
    slots: int,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ListedChoice:
    """`choose_clusters` among some clusters alone, whose scores are normalised over these (equation 3).

    Args:
        query: [H, G, D]; centroids: [H, C, D]; counts, first_row: [H, C] int32.
        runs: of the clusters to choose among, starts and running sums of lengths [H, R].
        slots: how many there are at most.
        budget: tokens to take of each head.

    Returns:
        See `ListedChoice`. Allocates the logits and six tensors [H, slots].
    """
    if query.is_cuda:
        from sparsekv.kernels.cluster_choice_triton import choose_listed_triton

        with torch.cuda.device(query.device):
            return choose_listed_triton(
                query, centroids, counts, first_row, runs, slots, budget, softmax_scale, softcap
            )
    return choose_listed_reference(query, centroids, counts, first_row, runs, slots, budget, softmax_scale, softcap)


def choose_listed_reference(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    first_row: torch.Tensor,
    runs: tuple[torch.Tensor, torch.Tensor],
    slots: int,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ListedChoice:
    """`choose_listed` in plain torch: gathers the centroids."""
    starts, ends = runs
    lengths = ends.diff(dim=-1, prepend=torch.zeros_like(ends[:, :1]))
    clusters, valid = expand_runs(starts, lengths, slots)
    some = centroids.gather(1, clusters[..., None].expand(-1, -1, centroids.shape[2]))
    numbers = counts.gather(-1, clusters) * valid
    logits, scores = _scored(query, some, numbers, softmax_scale, softcap)
    return ListedChoice(
        _best(logits, scores, numbers, budget), clusters.int(), (first_row.gather(-1, clusters) * valid).int()
    )
