"""A hierarchy of clusters, numbered so that members of one cluster, and children of one parent, are neighbours."""

from dataclasses import dataclass

import torch

from sparsekv.indexing.clustering import cluster_means, kmeans, to_space


@dataclass
class Level:
    """Clusters of one level: centroids [Hk, C, D] float32, token counts [Hk, C], and the parent of each [Hk, C]."""

    centroids: torch.Tensor
    counts: torch.Tensor
    parent: torch.Tensor | None = None


def build_levels(
    keys: torch.Tensor, sizes: list[int], *, space: str, iterations: int, seed: int
) -> tuple[list[Level], torch.Tensor]:
    """Cluster keys, then the centroids, then theirs: one level for each entry of `sizes`, finest first.

    A coarse centroid is the count-weighted mean of its children, so it is the mean of its member keys; empty
    clusters take no part in the next level.

    Args:
        keys: [Hk, M, D]; sizes: number of clusters, descending.

    Returns:
        the levels, and the labels [Hk, M] of the keys in the finest.
    """
    labels = kmeans(to_space(keys, space), sizes[0], iterations, seed)
    levels = [Level(*cluster_means(keys, labels, sizes[0]))]
    for size in sizes[1:]:
        below = levels[-1]
        filled = below.counts > 0
        size = min(size, int(filled.sum(1).min()))
        below.parent = kmeans(to_space(below.centroids, space), size, iterations, seed, filled)
        levels.append(Level(*cluster_means(below.centroids, below.parent, size, below.counts)))
    return levels, labels


def number_neighbours(levels: list[Level], labels: torch.Tensor) -> torch.Tensor:
    """Renumber every level in place, from the coarsest down, by parent and with empty clusters last.

    Returns:
        [Hk, M] labels of the tokens in the new numbers of the finest level.
    """
    new_number = None
    for level in reversed(levels):
        key = (level.counts == 0).long() * (1 << 40)
        if level.parent is not None and new_number is not None:
            # An empty cluster has no parent of its own; the last one keeps the children of each parent neighbours.
            empty = level.counts == 0
            level.parent = new_number.gather(1, level.parent).masked_fill(empty, new_number.shape[1] - 1)
            key = key + level.parent
        order = key.argsort(dim=1, stable=True)
        _permute(level, order)
        new_number = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1]).to(order).expand_as(order))
    assert new_number is not None
    return new_number.gather(1, labels)


def _permute(level: Level, order: torch.Tensor) -> None:
    level.centroids = level.centroids.gather(1, order[..., None].expand_as(level.centroids))
    level.counts = level.counts.gather(1, order)
    if level.parent is not None:
        level.parent = level.parent.gather(1, order)


def level_tensors(
    levels: list[Level], labels: torch.Tensor, first_token: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The artifact's tensors of a hierarchy.

    Args:
        labels: [Hk, M] of the tokens in the finest level.
        first_token: position in the prompt of the first of them.

    Returns:
        levelI.centroids [Hk, C_I, D], levelI.counts and levelI.parent [Hk, C_I] int32, token_order [Hk, M] int32
        (positions in the prompt, cluster by cluster), token_offsets [Hk, C_0 + 1] int32.
    """
    tensors = {
        "token_order": (labels.argsort(dim=1, stable=True) + first_token).int(),
        "token_offsets": torch.nn.functional.pad(levels[0].counts.long().cumsum(1), (1, 0)).int(),
    }
    for number, level in enumerate(levels):
        tensors[f"level{number}.centroids"] = level.centroids.to(dtype)
        tensors[f"level{number}.counts"] = level.counts.int()
        if level.parent is not None:
            tensors[f"level{number}.parent"] = level.parent.int()
    return tensors
