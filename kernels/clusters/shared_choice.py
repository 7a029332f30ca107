"""Choosing clusters for several questions over one document: those that any of them would choose for itself.

The choice of each question is that of `choose_clusters`, by the mean over all its tokens and query heads. A cluster is
taken from its first token on, so that together they take as many of its tokens as the one that takes most.
"""

import torch

from sparsekv.kernels.clusters.cluster_choice import choice_of, count_seen, ranked
from sparsekv.kernels.clusters.types import SharedChoice
from sparsekv.kernels.common.runs import fill_budget
from sparsekv.kernels.scores.logits import attention_logits, scores_from_logits

MOST_CLUSTERS = 32_768
"""Clusters of a head that a program ranks at once."""


def choose_together(
    query: torch.Tensor,
    ends: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    budget: int,
    capacity: int,
    softmax_scale: float,
    softcap: float | None = None,
    thresholds: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> SharedChoice:
    """What B questions take together: each the best clusters for its budget, or those whose score reaches a threshold.

    On a GPU four kernels, no synchronisation, and no shapes that depend on data.

    Args:
        query: [H, G, T, D], tokens of all questions, one question after another.
        ends: [B] int32, after which token each question ends; each has at least one.
        centroids: [H, C, D], C at most `MOST_CLUSTERS`; counts, starts: [H, C] int, tokens and first row of each,
            at most `MOST_TOKENS` tokens a head.
        budget: tokens for each question in each head.
        capacity: of the rows of a head; must be enough.
        thresholds: [B] float32, of each question; None: its budget decides.
        seen: [H] int64, to which the number of tokens taken is added.

    Returns:
        See `SharedChoice`. Allocates scores [H, T, C] float32, the rows, and three tensors [H, C].
    """
    arguments = query, ends, centroids, counts, starts, budget, capacity, softmax_scale, softcap, thresholds, seen
    if query.is_cuda:
        from sparsekv.kernels.clusters.shared_choice_triton import choose_together_triton

        with torch.cuda.device_of(query):  # Triton launches on the current device, which may be another
            return choose_together_triton(*arguments)
    return choose_together_reference(*arguments)


def choose_together_reference(
    query: torch.Tensor,
    ends: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    budget: int,
    capacity: int,
    softmax_scale: float,
    softcap: float | None = None,
    thresholds: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> SharedChoice:
    """`choose_together` in plain torch."""
    empty = counts[:, None, None] == 0
    logits = attention_logits(query, centroids, softmax_scale, softcap).masked_fill(empty, -torch.inf)
    each = scores_from_logits(logits, counts[:, None, None])
    question = torch.searchsorted(ends, torch.arange(query.shape[2], device=ends.device), right=True, out_int32=True)
    sums = each.new_zeros(len(each), len(ends), each.shape[2]).index_add_(1, question, each)
    scores, sizes = sums / ends.diff(prepend=ends.new_zeros(1))[:, None], counts[:, None].expand_as(sums)
    if thresholds is not None:
        taken = sizes * (scores >= thresholds[:, None])
    else:
        order = ranked(scores, budget)
        taken = torch.zeros_like(order).scatter_(-1, order, fill_budget(sizes.gather(-1, order).long(), budget))
    lengths = taken.amax(1).int()
    chosen = count_seen(choice_of(logits, lengths, counts - lengths, starts, capacity), seen)
    return SharedChoice(chosen.lengths, chosen.log_left, chosen.rows, chosen.used)
