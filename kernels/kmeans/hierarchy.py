"""Hierarchies of clusters, with blocks, appended tokens and outliers.

The children of a cluster have consecutive indices. The tokens of a cluster are adjacent in the stored token order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch.nn.functional import pad

from sparsekv.kernels.kmeans.kmeans import assign, cluster_means, lloyd, random_kmeans, to_space


def block_offsets(tokens: int, block: int) -> list[int]:
    """Compute the first token of each block, and the end of the last block.

    All blocks but the last are closed, with W tokens. The last block is open: it has at least alpha = W / 2 tokens, or
    fewer if the sequence is shorter. When it reaches W + alpha tokens, its first W tokens become a closed block. So the
    cuts depend only on the number of tokens, not on how they were appended.

    Args:
        tokens: length of the sequence, at least 1.
        block: W, the number of tokens of a closed block, at least 2.
    """
    least_open = block // 2
    closed = max(0, tokens - least_open) // block
    return [*range(0, closed * block + 1, block), tokens]


def equal_neighbours(offsets: list[int], most: int) -> list[list[int]]:
    """Group adjacent blocks of equal length; return each group's offsets: its blocks' first tokens, and its end.

    The blocks of a group have at most `most` tokens in total, except for a group of a single block.
    """
    runs: list[list[int]] = []
    for start, stop in pairwise(offsets):
        if runs and stop - start == runs[-1][1] - runs[-1][0] and stop - runs[-1][0] <= most:
            runs[-1].append(stop)
        else:
            runs.append([start, stop])
    return runs


@dataclass
class Level:
    """Clusters of one level: centroids [Hk, C, D] float32, token counts [Hk, C], and parent indices [Hk, C].

    A parent is a cluster of the next coarser level. The coarsest level has None.
    """

    centroids: torch.Tensor
    counts: torch.Tensor
    parent: torch.Tensor | None = None


Cluster = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]
"""Function that clusters points and returns labels [Hk, M].

Its arguments are points [Hk, M, D] float32, a number of clusters, and a mask [Hk, M] of the points to use.
"""


def levels_above(keys: torch.Tensor, labels: torch.Tensor, sizes: list[int], cluster: Cluster) -> list[Level]:
    """Build all levels, finest first: the finest from its labels, and each coarser level by clustering the next finer.

    A coarse centroid is the count-weighted mean of its children, and so the mean of its member keys. Empty clusters of
    the finer level are left out of the clustering.

    Args:
        keys: [Hk, M, D]; labels: [Hk, M] of the finest level.
        sizes: number of clusters of each level, finest first, descending. A coarser level has fewer if a head has fewer
            non-empty clusters in the finer level.
        cluster: the function that clusters centroids.
    """
    levels = [Level(*cluster_means(keys, labels, sizes[0]))]
    for size in sizes[1:]:
        below = levels[-1]
        filled = below.counts > 0
        size = min(size, int(filled.sum(1).min()))
        below.parent = cluster(below.centroids, size, filled)
        levels.append(Level(*cluster_means(below.centroids, below.parent, size, below.counts)))
    return levels


def level_sizes(shares: Sequence[float], tokens: int) -> list[int]:
    """Compute each level's number of clusters: its share times the number of tokens, rounded, and at least one."""
    return [max(1, round(share * tokens)) for share in shares]


def number_neighbours(levels: list[Level], labels: torch.Tensor) -> torch.Tensor:
    """Renumber the clusters of every level in place, so that the children of each parent are contiguous.

    In each level, the clusters are ordered by their parents, and empty clusters come last. The coarsest level is
    renumbered first.

    Returns:
        [Hk, M] labels of the tokens, as new cluster indices of the finest level.
    """
    new_number = None
    for level in reversed(levels):
        key = (level.counts == 0).long() * (1 << 40)
        if level.parent is not None and new_number is not None:
            # An empty cluster has no parent. Its parent is set to the last index, so that the children of each parent
            # stay contiguous.
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
    levels: list[Level], labels: torch.Tensor, values: torch.Tensor, first_token: int, keys: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Build the artifact's tensors of a hierarchy.

    Args:
        labels: [Hk, M], the tokens' clusters in the finest level.
        values: [Hk, M, D], the tokens' values; the centroids get their dtype.
        first_token: position in the prompt of the first token.
        keys: [Hk, M, D], the attended keys, if the levels were clustered from other keys (such as keys with RoPE
            undone).

    Returns:
        levelI.centroids and levelI.value_centroids [Hk, C_I, D], levelI.counts and levelI.parent [Hk, C_I] int32,
        token_order [Hk, M] int32 (positions in the prompt, cluster by cluster), token_offsets [Hk, C_0 + 1] int32.
        With `keys`, levelI.centroids are the means of these keys, and levelI.lookup_centroids are the levels' own
        centroids.
    """
    own_name, other_rows = "centroids", {"value_centroids": values}
    if keys is not None:
        own_name, other_rows = "lookup_centroids", other_rows | {"centroids": keys}
    tensors = {
        "token_order": (labels.argsort(dim=1, stable=True) + first_token).int(),
        "token_offsets": torch.nn.functional.pad(levels[0].counts.long().cumsum(1), (1, 0)).int(),
    }
    size = levels[0].counts.shape[1]
    means = {name: cluster_means(rows, labels, size)[0] for name, rows in other_rows.items()}
    for number, level in enumerate(levels):
        for name, rows in {own_name: level.centroids, **means}.items():
            tensors[f"level{number}.{name}"] = rows.to(values.dtype)
        tensors[f"level{number}.counts"] = level.counts.int()
        if level.parent is not None:
            tensors[f"level{number}.parent"] = level.parent.int()
            size = levels[number + 1].counts.shape[1]
            means = {name: cluster_means(rows, level.parent, size, level.counts)[0] for name, rows in means.items()}
    return tensors


def join_blocks(blocks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Concatenate the hierarchies of neighbouring blocks; no cluster crosses a block.

    Returns:
        the tensors of `level_tensors`, with cluster indices that continue from block to block, and block_clusters
        [Hk, blocks + 1] int32: the first finest-level cluster of each block, then the number of clusters.
    """
    joined = {name: torch.cat([block[name] for block in blocks], 1) for name in blocks[0] if name != "token_offsets"}
    for name in joined:
        if name.endswith(".parent"):
            above = f"level{int(name.removeprefix('level').removesuffix('.parent')) + 1}.counts"
            first = _first_numbers([block[above].shape[1] for block in blocks])
            joined[name] = torch.cat([block[name] + start for block, start in zip(blocks, first, strict=False)], 1)
    joined["token_offsets"] = torch.nn.functional.pad(joined["level0.counts"].long().cumsum(1), (1, 0)).int()
    clusters = torch.tensor(_first_numbers([block["level0.counts"].shape[1] for block in blocks]))
    joined["block_clusters"] = clusters.int().expand(len(joined["token_order"]), -1).contiguous()
    return joined


def _first_numbers(sizes: list[int]) -> list[int]:
    return [0, *accumulate(sizes)]


REFINEMENTS = 3  # full k-means iterations over a block after its new tokens are assigned


def join_tokens(
    points: torch.Tensor, labels: torch.Tensor, clusters: int, all_clusters: int, generator: torch.Generator
) -> torch.Tensor:
    """Recluster a block after tokens were appended to it; return the labels of all its tokens.

    The centres of the added clusters, and of empty clusters, are distinct samples of the new tokens, or zero if there
    are too few. Each new token is assigned to its nearest centre, and the centre moves to the mean of its members (a
    step of sequential k-means). Then a few k-means iterations run over the whole block.

    Args:
        points: [Hk, T, D] float32, the block's keys in the space in which they are clustered, old tokens first.
        labels: [Hk, T_old] int64, labels of the old tokens.
        clusters: number of clusters of the old tokens.
        all_clusters: number of clusters of the result, at least `clusters`.
        generator: random generator of the samples, on the points' device.

    Returns:
        [Hk, T] int64. Allocates the centres a few times, the memory of `assign` and, in plain torch, a copy of the
        points.
    """
    return join_in_order(points, labels, clusters, all_clusters, sampling_order(points, labels, generator))


def sampling_order(points: torch.Tensor, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw the random order [Hk, T_new] int64 in which the new points of `join_tokens` become centres."""
    size = len(points), points.shape[1] - labels.shape[1]
    return torch.rand(size, generator=generator, device=points.device).argsort(dim=-1)


def join_in_order(
    points: torch.Tensor, labels: torch.Tensor, clusters: int, all_clusters: int, order: torch.Tensor
) -> torch.Tensor:
    """Run `join_tokens` with the result of `sampling_order` as the argument `order`.

    A CUDA graph can capture this function, because it has no synchronisation and no data-dependent shape.
    """
    old, new = points[:, : labels.shape[1]], points[:, labels.shape[1] :]
    more = all_clusters - clusters
    centres, counts = cluster_means(old, labels, clusters)
    centres, counts = pad(centres, (0, 0, 0, more)), pad(counts, (0, more))
    empty = counts == 0
    number = empty.cumsum(1) - 1
    sample = order.gather(1, number.clamp(0, order.shape[1] - 1))[..., None].expand_as(centres)
    sampled = empty & (number < order.shape[1])
    centres = torch.where(sampled[..., None], new.gather(1, sample), centres)
    means, joined = cluster_means(new, assign(new, centres), centres.shape[1])
    moved = (centres * counts[..., None] + means * joined[..., None]) / (counts + joined).clamp(min=1)[..., None]
    centres = torch.where(joined[..., None] > 0, moved, centres)
    return lloyd(points, centres, REFINEMENTS)[0]


def online_levels(
    keys: torch.Tensor,
    labels: torch.Tensor,
    clusters: int,
    shares: tuple[float, ...],
    space: str,
    iterations: int,
    generator: torch.Generator,
) -> list[Level]:
    """Build all levels of a block with keys [Hk, T, D], from the labels [Hk, T] of the finest level.

    The finest level has `clusters` clusters. Coarser levels are clustered from scratch, by `iterations` iterations of
    k-means, in the space `space` of `to_space`. Their numbers of clusters are the shares `shares[1:]` of the tokens, or
    fewer as in `levels_above`.
    """

    def cluster(points: torch.Tensor, clusters: int, valid: torch.Tensor) -> torch.Tensor:
        return random_kmeans(to_space(points, space, valid), clusters, iterations, generator, valid)

    return levels_above(keys, labels, [clusters, *level_sizes(shares, keys.shape[1])[1:]], cluster)


def finest_size(levels: Sequence[float], outliers: float, tokens: int) -> int:
    """Compute the number of clusters of the finest level, including one for each outlier (`single_out`)."""
    return level_sizes(levels, tokens)[0] + round(outliers * tokens)


def single_out(points: torch.Tensor, labels: torch.Tensor, clusters: int, share: float) -> tuple[torch.Tensor, int]:
    """Move each head's outliers, the points farthest from their centroids, to clusters of a single point each.

    The new clusters have the last indices. Allocates a float32 copy of the points.

    Args:
        points: [Hk, M, D].
        labels: [Hk, M] int64, below `clusters`.
        clusters: number of clusters so far.
        share: share of the points that are outliers.

    Returns:
        Labels [Hk, M] and the new number of clusters. Clusters may become empty.
    """
    singled = round(share * points.shape[1])
    if not singled:
        return labels, clusters
    centroids, _ = cluster_means(points, labels, clusters)
    away = centroids.gather(1, labels[..., None].expand_as(points)).sub_(points).square_().sum(-1)
    farthest = away.topk(singled, dim=1).indices
    own = torch.arange(clusters, clusters + singled, device=labels.device)
    return labels.scatter(1, farthest, own.expand_as(farthest)), clusters + singled
