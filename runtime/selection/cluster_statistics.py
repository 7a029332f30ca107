"""Statistics of a clustering: sizes and distortion per level, blocks, and the tokens of its biggest clusters."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from sparsekv.runtime.selection.distortion import cluster_spreads, relative_spreads


@dataclass(frozen=True)
class LevelShape:
    """One level of one layer, over all KV heads: tokens per cluster, with quantiles over the non-empty clusters,
    and how many have one token, such as outliers.

    `key_spread` and `value_spread` are the quantisation distortion of keys and values (`relative_spreads`), None where
    the index has no such centroids.
    """

    level: int
    clusters: int
    empty: int
    single: int
    min: int
    median: float
    p99: float
    max: int
    key_spread: float | None
    value_spread: float | None


@dataclass(frozen=True)
class Block:
    """A block of tokens that was clustered on its own: prompt positions `start` to `stop` (excluded), and its number of
    finest clusters per KV head. New tokens are appended to the open block."""

    start: int
    stop: int
    tokens: int
    clusters: int
    open: bool


@dataclass(frozen=True)
class Cluster:
    """One cluster of the finest level: its KV head, its number and the positions of its tokens in the prompt.

    `key_spread` is the distance of its keys to its centroid (`cluster_spreads`).
    """

    kv_head: int
    cluster: int
    positions: list[int]
    key_spread: float


@dataclass(frozen=True)
class Clustering:
    """One layer's clusters. `levels` start with the finest, whose token counts are `counts` [Hk, C].

    `blocks` are in order of position; empty where the middle was clustered as a whole.
    """

    levels: list[LevelShape]
    blocks: list[Block]
    counts: torch.Tensor
    biggest: list[Cluster]
    most_spread: list[Cluster]


def describe_clusters(
    tensors: dict[str, torch.Tensor], keys: torch.Tensor, values: torch.Tensor, first_token: int, biggest: int
) -> Clustering:
    """Describe a layer from the artifact's tensors, with token positions counted from the first middle token.

    Args:
        keys, values: [Hk, M, D] of the middle, as attended, in order of position.
        first_token: position in the prompt of the first middle token.
        biggest: how many of the biggest clusters, and of the most spread ones of several tokens, to list, over all KV
            heads.
    """
    counts = tensors["level0.counts"]
    own = cluster_spreads(keys, tensors)
    several = torch.where(counts > 1, own, -1.0)
    largest, loosest = (one.flatten().topk(min(biggest, counts.numel())).indices.tolist() for one in (counts, several))

    def clusters(numbers: list[int]) -> list[Cluster]:
        places = (divmod(number, counts.shape[1]) for number in numbers)
        return [_cluster(tensors, first_token, *place, float(own[place])) for place in places]

    spreads = (relative_spreads(keys, tensors, "centroids"), relative_spreads(values, tensors, "value_centroids"))
    return Clustering(
        levels=_levels(tensors, *spreads),
        blocks=_blocks(tensors, first_token),
        counts=counts.cpu(),
        biggest=clusters(largest),
        most_spread=clusters(loosest),
    )


def _levels(tensors: dict[str, torch.Tensor], key_spreads: list[float], value_spreads: list[float]) -> list[LevelShape]:
    shapes = []
    for level in range(sum(name.endswith(".counts") for name in tensors)):
        counts = tensors[f"level{level}.counts"]
        filled = counts[counts > 0].double()
        shapes.append(
            LevelShape(
                level=level,
                clusters=counts.numel(),
                empty=int((counts == 0).sum()),
                single=int((counts == 1).sum()),
                min=int(filled.min()),
                median=float(filled.quantile(0.5)),
                p99=float(filled.quantile(0.99)),
                max=int(filled.max()),
                key_spread=key_spreads[level] if key_spreads else None,
                value_spread=value_spreads[level] if value_spreads else None,
            )
        )
    return shapes


def _blocks(tensors: dict[str, torch.Tensor], first_token: int) -> list[Block]:
    if "block_offsets" not in tensors:
        return []
    tokens = list(pairwise(tensors["block_offsets"].tolist()))
    clusters = list(pairwise(tensors["block_clusters"][0].tolist()))
    return [
        Block(start + first_token, stop + first_token, stop - start, end - first, open=number == len(tokens) - 1)
        for number, ((start, stop), (first, end)) in enumerate(zip(tokens, clusters, strict=True))
    ]


def _cluster(tensors: dict[str, torch.Tensor], first_token: int, kv_head: int, cluster: int, spread: float) -> Cluster:
    start, stop = tensors["token_offsets"][kv_head, cluster : cluster + 2].tolist()
    positions = tensors["token_order"][kv_head, start:stop] + first_token
    return Cluster(kv_head, cluster, sorted(positions.tolist()), spread)
