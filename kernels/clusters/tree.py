"""Lookup in a hierarchy of centroids that reads only the children of opened clusters."""

from dataclasses import dataclass

import torch

from sparsekv.kernels.common.runs import expand_runs
from sparsekv.kernels.scores.logits import attention_logits, scores_from_logits


@dataclass(frozen=True)
class Tree:
    """Levels of clusters, finest first: centroids [Hk, C_I, D] and counts of tokens [Hk, C_I]. A cluster of level
    I >= 1 has `children[I - 1]` [Hk, C_I] children in the level below, from `first_child[I - 1]` [Hk, C_I] on."""

    centroids: tuple[torch.Tensor, ...]
    counts: tuple[torch.Tensor, ...]
    first_child: tuple[torch.Tensor, ...]
    children: tuple[torch.Tensor, ...]


def tree_from_tensors(tensors: dict[str, torch.Tensor]) -> Tree:
    """A tree from the artifact's levelI.centroids, levelI.counts and levelI.parent."""
    levels = sum(name.endswith(".centroids") for name in tensors)
    centroids = tuple(tensors[f"level{level}.centroids"] for level in range(levels))
    first_child, children = [], []
    for level in range(levels - 1):
        number = torch.zeros(centroids[level + 1].shape[:2], dtype=torch.int64, device=centroids[0].device)
        parent = tensors[f"level{level}.parent"].long()
        number.scatter_add_(1, parent, torch.ones_like(parent))
        children.append(number)
        first_child.append(number.cumsum(1) - number)
    counts = tuple(tensors[f"level{level}.counts"] for level in range(levels))
    return Tree(centroids, counts, tuple(first_child), tuple(children))


def child_scores(
    query: torch.Tensor,
    tree: Tree,
    level: int,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    capacity: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores of given clusters of a level, normalised over these alone (Squeezed Attention, equation 3).

    Args:
        query: [Hk, G, Q, D].
        level: the level of the clusters, which are given as runs, `starts` and `lengths` [Hk, Q or 1, R].
        capacity: slots for the clusters; allocates [Hk, Q or 1, capacity, D] centroids.

    Returns:
        scores [Hk, Q, capacity] (0 in unused slots), cluster indices and token counts [Hk, Q or 1, capacity].
    """
    clusters, valid = expand_runs(starts, lengths, capacity)
    Hk, rows = clusters.shape[0], clusters.shape[1]
    head = torch.arange(Hk, device=clusters.device)[:, None, None].expand(Hk, rows, 1)
    centroids = tree.centroids[level][head, clusters]
    counts = torch.where(valid, tree.counts[level][head, clusters], 0)
    # Queries that share their clusters are scored together, others against their own clusters.
    by_row = query.unflatten(2, (rows, -1)).transpose(1, 2).flatten(0, 1)
    logits = attention_logits(by_row, centroids.flatten(0, 1), softmax_scale, softcap)
    logits = logits.unflatten(0, (Hk, rows)).transpose(1, 2).flatten(2, 3)
    return scores_from_logits(logits, counts[:, None]), clusters, counts


def fewest_tokens(counts: torch.Tensor) -> torch.Tensor:
    """[C] on the CPU: entry n is the fewest tokens that any n + 1 non-empty clusters of a head hold; at most M."""
    total = counts.sum(-1, keepdim=True)
    smallest_first = torch.where(counts > 0, counts, total).sort(-1).values.long()
    return smallest_first.cumsum(-1).clamp(max=int(total[0])).amin(0).cpu()
