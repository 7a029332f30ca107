"""Statistics of clusters and posting lists: sizes, quantisation distortion, and each subspace's share in a ranking."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class ListShape:
    """Statistics of one layer's posting lists, over all KV heads.

    Attributes:
        lists: number of posting lists.
        entries: length of each list.
        keys_listed: share of the keys between sinks and tail that are in at least one list of their head.
        in_lists: share of a head's lists that contain a given key; the (lower) median over all keys.
        subspace_shares: share of each subspace in the ranking (see the function `subspace_shares`), as means over
            queries and heads. The shares add up to 1.
        ranked_shares: the same shares, sorted from highest to lowest for each query before the mean is taken.
    """

    lists: int
    entries: int
    keys_listed: float
    in_lists: float
    subspace_shares: list[float]
    ranked_shares: list[float]


def describe_lists(
    tensors: dict[str, torch.Tensor], keys: torch.Tensor, queries: torch.Tensor, first_token: int
) -> ListShape:
    """Compute the statistics of a layer's posting lists. Reads all lists and keys, one head and subspace at a time.

    Args:
        tensors: tensors of the index; see `CSAttentionIndexer`.
        keys: [Hk, M, D] of the tokens between sinks and tail, as attended, in order of position.
        queries: [Hk, G, R, D], R queries of each query head.
        first_token: position in the prompt of the first token after the sinks.
    """
    heads, subspaces, centroids, entries = tensors["table_tokens"].shape
    named = torch.stack([_named(lists, keys.shape[1], first_token) for lists in tensors["table_tokens"]])
    heads_rows = zip(queries.flatten(1, 2), keys, strict=True)
    shares = torch.cat([subspace_shares(*rows, tensors["channels"]) for rows in heads_rows])
    return ListShape(
        lists=heads * subspaces * centroids,
        entries=entries,
        keys_listed=float((named > 0).double().mean()),
        in_lists=float(named.median()) / (subspaces * centroids),
        subspace_shares=shares.mean(0).tolist(),
        ranked_shares=shares.sort(-1, descending=True).values.mean(0).tolist(),
    )


def subspace_shares(queries: torch.Tensor, keys: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Compute each subspace's share in the ranking of one head's keys: [R, m] float64; each row adds up to 1.

    A logit q k is the sum over subspaces b of q_b k_b. A term that is the same for all keys does not change the
    ranking. Therefore a subspace is weighted by the standard deviation of q_b k_b over the keys. The subspace's share
    is this deviation divided by the sum of the deviations of all subspaces. If all keys are equal, each share is 1 / m.

    The deviation is sqrt(q_b^T V_b q_b), where V_b is the covariance of the keys k_b. Therefore no logits are computed.
    Allocates one subspace's keys [M, D / m] twice in float64.

    Args:
        queries: [R, D], R queries on this head.
        keys: [M, D].
        channels: [m, D / m], the channels of each of the m subspaces.
    """
    deviations = torch.stack([_deviation(queries[:, part], keys[:, part]) for part in channels.long()], -1)
    total = deviations.sum(-1, keepdim=True)
    return torch.where(total > 0, deviations / total, 1 / len(channels))


def _deviation(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Compute the standard deviation [R] float64 of the products of each query [R, d] with all keys [M, d]."""
    queries, keys = queries.double(), keys.double()
    keys = keys - keys.mean(0)
    covariance = keys.T @ keys / len(keys)
    return ((queries @ covariance) * queries).sum(-1).clamp(min=0).sqrt()


def _named(lists: torch.Tensor, keys: int, first_token: int) -> torch.Tensor:
    """Count, for each key, the posting lists of one head [m, C, L] that contain the key: [M] int64."""
    counts = [torch.bincount(tokens.flatten() - first_token, minlength=keys) for tokens in lists]
    return torch.stack(counts).sum(0)


def relative_spreads(rows: torch.Tensor, tensors: dict[str, torch.Tensor], name: str) -> list[float]:
    """Compute the relative distance of rows to their clusters' centroids, for each level, finest first.

    The relative distance is sqrt(sum |r - c|^2 / sum |r - mean|^2). The sums are over the rows r of all KV heads. The
    centroid of r's cluster is c, and the mean is that of the rows of r's head. The result is 0 if all rows of each
    cluster are equal, and 1 if centroids are no better than the mean. The square of the result is the share of the
    variance that is lost if each row is replaced by its centroid. Allocates a few copies of one head's rows in float32.

    Args:
        rows: [Hk, M, D] of the tokens between sinks and tail, in order of position.
        tensors: tensors of the index, with token positions counted from the first token after the sinks.
        name: name of the centroids levelI.NAME [Hk, C_I, D]. Levels without such centroids are left out.
    """
    levels = sum(key.endswith(f".{name}") for key in tensors)
    total, left = 0.0, [0.0] * levels
    for head, of_head in enumerate(rows if levels else ()):
        ordered, labels = _in_clusters(of_head, tensors, head)
        total += _square_sum(ordered - ordered.mean(0, dtype=torch.float64).float())
        for level in range(levels):
            if level:
                labels = tensors[f"level{level - 1}.parent"][head].long()[labels]
            left[level] += _square_sum(ordered - tensors[f"level{level}.{name}"][head].float()[labels])
    # A total of 0 means that all rows of each head are equal, so their centroids have no distortion.
    return [math.sqrt(one / total) if total else 0.0 for one in left]


def cluster_spreads(keys: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the relative distance of each finest cluster's keys to its centroid: [Hk, C] float64.

    Let c be the cluster's centroid. The relative distance is the root mean square of |k - c| over the cluster's keys k,
    divided by the root mean square of |k - mean| over all keys of the head. The result is 0 for a cluster without keys,
    and for a head whose keys are all equal.

    Args:
        keys: [Hk, M, D] of the tokens between sinks and tail, in order of position.
        tensors: tensors of the index, with token positions counted from the first token after the sinks.
    """
    spreads = []
    for head, of_head in enumerate(keys):
        (ordered, labels), counts = _in_clusters(of_head, tensors, head), tensors["level0.counts"][head].long()
        apart = (ordered - tensors["level0.centroids"][head].float()[labels]).square().sum(-1, dtype=torch.float64)
        sums = torch.zeros(len(counts), dtype=torch.float64, device=counts.device).index_add(0, labels, apart)
        mean = sums / counts.clamp(min=1)
        total = _square_sum(ordered - ordered.mean(0, dtype=torch.float64).float()) / max(1, len(ordered))
        spreads.append((mean / total).sqrt() if total else torch.zeros_like(mean))
    return torch.stack(spreads)


def _in_clusters(rows: torch.Tensor, tensors: dict[str, torch.Tensor], head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a head's rows [M, D] in float32, ordered by cluster, and the finest cluster [M] of each row."""
    counts = tensors["level0.counts"][head].long()
    labels = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return rows[tensors["token_order"][head].long()].float(), labels


def _square_sum(rows: torch.Tensor) -> float:
    return float(rows.square().sum(dtype=torch.float64))


@dataclass(frozen=True)
class LevelShape:
    """Statistics of the clusters of one level of one layer, over all KV heads.

    Attributes:
        clusters, empty, single: number of all clusters, of empty clusters, and of clusters of one token, such as
            outliers.
        min, median, p99, max: tokens per cluster, over the non-empty clusters.
        key_spread, value_spread: quantisation distortion of keys and values (`relative_spreads`); None if the index has
            no such centroids.
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
    """A block of tokens that was clustered apart from other blocks: prompt positions `start` to `stop` (excluded).

    `clusters` is the number of finest clusters per KV head. `open` is True for the last block, to which new tokens are
    appended.
    """

    start: int
    stop: int
    tokens: int
    clusters: int
    open: bool


@dataclass(frozen=True)
class Cluster:
    """One cluster of the finest level: its KV head, its index and the positions of its tokens in the prompt.

    `key_spread` is the relative distance of the cluster's keys to the centroid (`cluster_spreads`).
    """

    kv_head: int
    cluster: int
    positions: list[int]
    key_spread: float


@dataclass(frozen=True)
class Clustering:
    """One layer's clusters.

    Attributes:
        levels: statistics of each level, finest first.
        blocks: blocks in order of position; empty if the middle was clustered as a whole.
        counts: [Hk, C], token counts of the finest clusters.
        biggest: the clusters with the most tokens, without empty clusters.
        most_spread: the clusters with the largest `key_spread`, without clusters of fewer than two tokens.
    """

    levels: list[LevelShape]
    blocks: list[Block]
    counts: torch.Tensor
    biggest: list[Cluster]
    most_spread: list[Cluster]


def describe_clusters(
    tensors: dict[str, torch.Tensor], keys: torch.Tensor, values: torch.Tensor, first_token: int, biggest: int
) -> Clustering:
    """Compute the statistics of a layer's clusters.

    Args:
        tensors: tensors of the index, with token positions counted from the first token after the sinks.
        keys, values: [Hk, M, D] of the tokens between sinks and tail, as attended, in order of position.
        first_token: position in the prompt of the first token after the sinks.
        biggest: maximum number of clusters in `Clustering.biggest` and in `Clustering.most_spread`, over all KV heads.
    """
    counts = tensors["level0.counts"]
    own = cluster_spreads(keys, tensors)

    def first(measure: torch.Tensor, least: int) -> list[Cluster]:
        """Return the clusters of at least `least` tokens with the largest measures [Hk, C]."""
        listed = counts >= least
        best = measure.masked_fill(~listed, -1).flatten().topk(min(biggest, int(listed.sum()))).indices
        numbers: list[int] = best.tolist()
        places = (divmod(number, counts.shape[1]) for number in numbers)
        return [_cluster(tensors, first_token, *place, float(own[place])) for place in places]

    spreads = (relative_spreads(keys, tensors, "centroids"), relative_spreads(values, tensors, "value_centroids"))
    return Clustering(
        levels=_levels(tensors, *spreads),
        blocks=_blocks(tensors, first_token),
        counts=counts.cpu(),
        biggest=first(counts, 1),
        most_spread=first(own, 2),
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
