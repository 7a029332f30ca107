"""Scores of QuoKA, query-oriented KV selection for chunked prefill (section 3 of its paper).

Keys are scored by their cosines to a few of a chunk's queries.
"""

import torch
from torch.nn.functional import normalize

from sparsekv.kernels.common.on_gpu import on_gpu
from sparsekv.kernels.scores.logits import products

# Limits of the GPU kernels, which hold the directions and the queries of a group in registers.
MOST_DIRECTIONS, MOST_QUERIES = 64, 2**14


def subselect_queries(query: torch.Tensor, count: int, subset: str = "far", seed: int = 0) -> torch.Tensor:
    """Select, in each query head, the queries that represent a prefill chunk of B tokens.

    These are the queries with the lowest cosine similarity to the head's mean query of the chunk.

    Args:
        query: [Hk, G, B, D].
        count: number of queries to keep; all are kept if B is not larger.
        subset: `far` selects as described above; `random` and `all` are the paper's ablations.
        seed: random seed for `random`.

    Returns:
        [Hk, G, count, D], or all queries.
    """
    if subset == "all" or query.shape[2] <= count:
        return query
    if subset == "random":
        draws = torch.rand(query.shape[2], generator=torch.Generator().manual_seed(seed))
        return query[:, :, draws.topk(count).indices.to(query.device)]
    mean = query.float().mean(2, keepdim=True)
    nearness = torch.cosine_similarity(query.float(), mean, dim=-1)
    places = nearness.topk(count, -1, largest=False).indices
    return query.gather(2, places[..., None].expand(-1, -1, -1, query.shape[-1]))


def directions(query: torch.Tensor) -> torch.Tensor:
    """Normalise queries [Hk, G, Q, D] and average them over the group. The averages are not of unit length.

    Returns [Hk, Q, D] float32.
    """
    averaged: torch.Tensor = normalize(query.float(), dim=-1).mean(1)
    return averaged


def _few_queries(query: torch.Tensor, count: int) -> bool:
    _, G, B, _ = query.shape
    return count <= MOST_DIRECTIONS and count < B and G * B <= MOST_QUERIES


@on_gpu("sparsekv.kernels.scores.quoka_triton:far_directions_triton", fits=_few_queries)
def far_directions(query: torch.Tensor, count: int) -> torch.Tensor:
    """Compute the `directions` of the queries that `subselect_queries` keeps, with the least similar to the mean first.

    Direction i averages, over the query heads of a KV head, each head's normalised query of i-th lowest similarity. On
    a GPU, two kernels compute at most `MOST_DIRECTIONS` directions. They may order queries of equal similarity
    differently than torch does.

    Args:
        query: [Hk, G, B, D].
        count: number of queries to keep; all are kept if B is not larger.

    Returns:
        [Hk, count, D] float32; or [Hk, B, D] in the queries' order if all are kept.
    """
    return directions(subselect_queries(query, count))


@on_gpu(
    "sparsekv.kernels.scores.quoka_triton:nearest_keys_triton", fits=lambda some, *_: some.shape[1] <= MOST_DIRECTIONS
)
def nearest_keys(some: torch.Tensor, keys: torch.Tensor, count: int, first: int = 0, last: int = 0) -> torch.Tensor:
    """Choose `count` keys per head: the first and last keys, and the keys with the highest score for any direction.

    The score is the product of key and direction, divided by the key's norm. A direction averages the normalised
    queries of a group, so the score is the mean of these queries' cosines to the key.

    On a GPU, for at most `MOST_DIRECTIONS` directions, two kernels read the keys once and return indices in ascending
    order. They round scores to steps of 2 ** -15. Of equal rounded scores, the lower index wins.

    Args:
        some: [Hk, Q, D] directions.
        keys: [Hk, T, D].
        count: number of keys to choose, at least `first` + `last` and at most T.
        first, last: number of keys at the start, and number of keys at the end, that are always chosen.

    Returns:
        [Hk, count] int64 indices without duplicates.
    """
    return best_keys(_highest(some, keys) / key_norms(keys), count, first, last)


def best_keys(scores: torch.Tensor, count: int, first: int = 0, last: int = 0) -> torch.Tensor:
    """Choose `count` keys: `first` at the start, `last` at the end, and those with the highest scores [Hk, T].

    Return indices [Hk, count] int64 in any order. Overwrites the scores.
    """
    scores[:, scores.shape[1] - last :] = torch.inf
    scores[:, :first] = torch.inf
    return scores.topk(count, -1, sorted=False).indices


def key_norms(keys: torch.Tensor) -> torch.Tensor:
    """Compute the norms [Hk, T] float32 of keys [Hk, T, D], at least 1e-12, so that they can be divisors."""
    norms: torch.Tensor = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32)
    return norms.clamp(min=1e-12)


def quoka_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    norms: torch.Tensor | None = None,
    similarity: str = "cosine",
    across: str = "max",
) -> torch.Tensor:
    """Compute each key's largest similarity to Q queries; `across` may combine the similarities in another way.

    A similarity is averaged over the query heads of the key's KV head. For this, the heads' queries are averaged before
    the products with keys. Products are linear, and so this gives the mean of the heads' products at the cost of one
    head.

    Args:
        query: [Hk, G, Q, D].
        keys: [Hk, T, D].
        norms: [Hk, T], norms of the keys; None: computed here.
        similarity: `cosine`, or `dot`, the paper's ablation, in which neither queries nor keys are normalised.
        across: `max` over the queries, or `mean`, the paper's ablation; `none` keeps a score for each query.

    Returns:
        [Hk, 1, T] float32, or [Hk, Q, T] for `none`. Allocates [Hk, Q, T] float32.
    """
    averaged = query.float().mean(1) if similarity == "dot" else directions(query)
    averaged = averaged.mean(1, keepdim=True) if across == "mean" else averaged
    # The maximum is taken before the division. Norms are positive, and so the largest product is the largest cosine.
    scores = _highest(averaged, keys)[:, None] if across == "max" else products(averaged.to(keys.dtype), keys)
    if similarity == "dot":
        return scores
    return scores / (key_norms(keys) if norms is None else norms)[:, None]


def _highest(some: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Compute the largest product [Hk, T] float32 of each key [Hk, T, D] with any of the vectors [Hk, Q, D]."""
    return products(some.to(keys.dtype), keys).amax(1)
