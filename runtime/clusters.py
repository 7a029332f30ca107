"""What a clustering looks like: sizes per level, and the tokens of its biggest clusters."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LevelSizes:
    """Tokens per cluster in one level of one layer, over all KV heads; quantiles are of the clusters that hold any."""

    level: int
    clusters: int
    empty: int
    min: int
    median: float
    p99: float
    max: int


@dataclass(frozen=True)
class Cluster:
    """One cluster of the finest level: its KV head, its number and the positions of its tokens in the prompt."""

    kv_head: int
    cluster: int
    positions: list[int]


@dataclass(frozen=True)
class Clustering:
    """One layer's clusters; `sizes` holds each level's, finest first, `counts` [Hk, C] the finest level's."""

    sizes: list[LevelSizes]
    counts: torch.Tensor
    biggest: list[Cluster]


def describe_clusters(tensors: dict[str, torch.Tensor], biggest: int) -> Clustering:
    """Describe a layer from the artifact's levelI.counts, token_order and token_offsets.

    Args:
        biggest: how many of the biggest clusters to list, over all KV heads.
    """
    levels = sum(name.endswith(".counts") for name in tensors)
    counts = tensors["level0.counts"]
    largest = counts.flatten().topk(min(biggest, counts.numel())).indices.tolist()
    return Clustering(
        sizes=[_sizes(level, tensors[f"level{level}.counts"]) for level in range(levels)],
        counts=counts,
        biggest=[_cluster(tensors, *divmod(number, counts.shape[1])) for number in largest],
    )


def _sizes(level: int, counts: torch.Tensor) -> LevelSizes:
    filled = counts[counts > 0].double()
    return LevelSizes(
        level=level,
        clusters=counts.numel(),
        empty=int((counts == 0).sum()),
        min=int(filled.min()),
        median=float(filled.quantile(0.5)),
        p99=float(filled.quantile(0.99)),
        max=int(filled.max()),
    )


def _cluster(tensors: dict[str, torch.Tensor], kv_head: int, cluster: int) -> Cluster:
    start, stop = tensors["token_offsets"][kv_head, cluster : cluster + 2].tolist()
    return Cluster(kv_head, cluster, sorted(tensors["token_order"][kv_head, start:stop].tolist()))
