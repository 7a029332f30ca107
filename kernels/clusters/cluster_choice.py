"""Choosing whole clusters by their centroids for one decode step, to a budget of tokens.

The same choice as `cluster_scores` (Squeezed Attention, equation 1), a sort and `fill_budget`, for one query a head,
and with what the attention that follows needs: logits, runs, and how many tokens each centroid has left to stand for.
Down two levels the first choice is of clusters whose children are looked at, the second one is among those.
"""

import torch

from sparsekv.kernels.clusters.types import (
    EXPONENT_BITS,
    OPENED_BITS,
    SCORE_BITS,
    Children,
    ClusterChoice,
    ListedChoice,
    least_rank,
)
from sparsekv.kernels.common.runs import expand_runs, fill_budget
from sparsekv.kernels.scores.logits import attention_logits, scores_from_logits


def choose_clusters(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ClusterChoice:
    """The best clusters by S_i averaged over the group: whole ones, then the start of the one that passes the budget.

    Of scores that agree to one part in 128 the lower number is first. On a GPU three kernels, no synchronisation, and
    shapes that depend on no data.

    Args:
        query: [H, G, D]; centroids: [H, C, D]; counts, starts: [H, C] int, tokens of each cluster and the first row.
        budget: tokens to take of each head, which has `MOST_TOKENS` (2,097,151) at most.

    Returns:
        See `ClusterChoice`. Allocates the logits, the rows and nine tensors [H, C].
    """
    if query.is_cuda:
        from sparsekv.kernels.clusters.cluster_choice_triton import choose_clusters_triton

        with torch.cuda.device_of(query):  # Triton launches on the current device, which may be another
            return choose_clusters_triton(query, centroids, counts, starts, budget, softmax_scale, softcap)
    return choose_clusters_reference(query, centroids, counts, starts, budget, softmax_scale, softcap)


def choose_clusters_reference(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ClusterChoice:
    """`choose_clusters` in plain torch."""
    logits, scores = _scored(query, centroids, counts, softmax_scale, softcap)
    return _best(logits, scores, counts, starts, budget)


def _scored(
    query: torch.Tensor, centroids: torch.Tensor, counts: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [H, G, C] and scores [H, C] of clusters."""
    logits = attention_logits(query[:, :, None], centroids, scale, softcap)[:, :, 0]
    logits = logits.masked_fill(counts[:, None] == 0, -torch.inf)
    return logits, scores_from_logits(logits[:, :, None], counts[:, None, None])[:, 0]


def _best(
    logits: torch.Tensor, scores: torch.Tensor, counts: torch.Tensor, starts: torch.Tensor, budget: int
) -> ClusterChoice:
    order = _ranked(scores, budget)
    taken = fill_budget(counts.gather(-1, order).int(), budget).int()
    lengths = torch.zeros_like(taken).scatter_(-1, order, taken)
    return _choice(logits, lengths, counts - lengths, starts, budget)


def _ranked(scores: torch.Tensor, budget: int, bits: int = SCORE_BITS) -> torch.Tensor:
    """[H, C] numbers of clusters by rank, the highest first."""
    ranks = (scores.view(torch.int32) >> (23 - bits)) - least_rank(budget, bits)
    return ranks.clamp(0, 2 ** (EXPONENT_BITS + bits) - 1).argsort(dim=-1, descending=True, stable=True)


def _choice(
    logits: torch.Tensor, lengths: torch.Tensor, left: torch.Tensor, starts: torch.Tensor, slots: int
) -> ClusterChoice:
    """The same with its rows, in the order of the clusters; there is room for `slots`."""
    rows, _ = expand_runs(starts, lengths, slots)
    used = lengths.sum(-1, dtype=torch.int32)
    return ClusterChoice(logits, lengths, left.float().log(), rows.int(), used)


def open_clusters(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    children: Children,
    wanted: int,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ClusterChoice:
    """The best clusters, whole, until they have so many children and hold so many tokens.

    Of scores between the same powers of two the lower number is first: which ones of those are opened, the last of all,
    matters little, and on a GPU it takes a launch less to tell.

    Args:
        query: [H, G, D]; centroids: [H, C, D]; counts: [H, C] int32, of tokens.
        wanted: children of each head; budget: tokens.

    Returns:
        a choice whose members are children.
    """
    if query.is_cuda:
        from sparsekv.kernels.clusters.cluster_choice_triton import open_clusters_triton

        with torch.cuda.device_of(query):
            return open_clusters_triton(query, centroids, counts, children, wanted, budget, softmax_scale, softcap)
    return open_clusters_reference(query, centroids, counts, children, wanted, budget, softmax_scale, softcap)


def open_clusters_reference(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    children: Children,
    wanted: int,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ClusterChoice:
    """`open_clusters` in plain torch."""
    logits, scores = _scored(query, centroids, counts, softmax_scale, softcap)
    order = _ranked(scores, budget, OPENED_BITS)
    opened = until_enough(counts.gather(-1, order), children.numbers.gather(-1, order), wanted, budget)
    opened = torch.zeros_like(opened).scatter_(-1, order, opened)
    lengths = (children.numbers * opened).int()
    return _seen(_choice(logits, lengths, counts * ~opened, children.first, children.slots), children.seen)


def _seen(choice: ClusterChoice, seen: torch.Tensor | None) -> ClusterChoice:
    if seen is not None:
        seen += choice.used
    return choice


def until_enough(counts: torch.Tensor, children: torch.Tensor, wanted: int, budget: int) -> torch.Tensor:
    """Which clusters to open, [..., C] bool, of counts and children [..., C] in order: until both are reached."""
    held, had = counts.cumsum(-1) - counts, children.cumsum(-1) - children
    return (held < budget) | (had < wanted)


def keep_clusters(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    threshold: float,
    most: int,
    softmax_scale: float,
    softcap: float | None = None,
    seen: torch.Tensor | None = None,
) -> ClusterChoice:
    """All clusters whose S_i, averaged over the group, reaches a threshold; like `choose_clusters` in all else.

    Args:
        most: tokens of a head, for which there is room; seen: [H] int64, what is taken is added to it.
    """
    if query.is_cuda:
        from sparsekv.kernels.clusters.cluster_choice_triton import keep_clusters_triton

        with torch.cuda.device_of(query):
            return keep_clusters_triton(query, centroids, counts, starts, threshold, most, softmax_scale, softcap, seen)
    return keep_clusters_reference(query, centroids, counts, starts, threshold, most, softmax_scale, softcap, seen)


def keep_clusters_reference(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    threshold: float,
    most: int,
    softmax_scale: float,
    softcap: float | None = None,
    seen: torch.Tensor | None = None,
) -> ClusterChoice:
    """`keep_clusters` in plain torch."""
    logits, scores = _scored(query, centroids, counts, softmax_scale, softcap)
    lengths = (counts * (scores >= threshold)).int()
    return _seen(_choice(logits, lengths, counts - lengths, starts, most), seen)


def choose_listed(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    first_row: torch.Tensor,
    listed: tuple[torch.Tensor, torch.Tensor],
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ListedChoice:
    """`choose_clusters` among some clusters alone, whose scores are normalised over these (equation 3).

    Args:
        query: [H, G, D]; centroids: [H, C, D]; counts, first_row: [H, C] int32.
        listed: which clusters to choose among [H, S] int32, and how many these are of each head [H] int32.
        budget: tokens to take of each head.

    Returns:
        See `ListedChoice`. Allocates the logits, the rows and nine tensors [H, S].
    """
    if query.is_cuda:
        from sparsekv.kernels.clusters.cluster_choice_triton import choose_listed_triton

        with torch.cuda.device_of(query):
            return choose_listed_triton(query, centroids, counts, first_row, listed, budget, softmax_scale, softcap)
    return choose_listed_reference(query, centroids, counts, first_row, listed, budget, softmax_scale, softcap)


def choose_listed_reference(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    first_row: torch.Tensor,
    listed: tuple[torch.Tensor, torch.Tensor],
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ListedChoice:
    """`choose_listed` in plain torch: gathers the centroids."""
    valid = torch.arange(listed[0].shape[1], device=query.device) < listed[1][:, None]
    clusters = torch.where(valid, listed[0], 0).long()
    some = centroids.gather(1, clusters[..., None].expand(-1, -1, centroids.shape[2]))
    numbers, starts = counts.gather(-1, clusters) * valid, first_row.gather(-1, clusters) * valid
    logits, scores = _scored(query, some, numbers, softmax_scale, softcap)
    return ListedChoice(_best(logits, scores, numbers, starts, budget), starts.int())
