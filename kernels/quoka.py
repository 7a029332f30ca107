"""QuoKA's scores (section 3 of the paper): which keys a chunk of queries needs, by cosine to a few of its queries."""

import torch
from torch.nn.functional import normalize

from sparsekv.kernels.lookup import products


def subselect_queries(query: torch.Tensor, count: int, subset: str = "far", seed: int = 0) -> torch.Tensor:
    """The queries of each head that stand for its chunk: those of lowest cosine similarity to the chunk's mean query.

    Args:
        query: [Hk, G, B, D].
        count: how many; all of them where there are no more.
        subset: `far`; `random` and `all` are what the paper compares it with.
        seed: of the random ones.

    Returns:
        [Hk, G, count, D].
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


def key_norms(keys: torch.Tensor) -> torch.Tensor:
    """[Hk, T] float32 of keys [Hk, T, D]; at least a tiny number, so that they can be divided by."""
    norms: torch.Tensor = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32)
    return norms.clamp(min=1e-12)


def quoka_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    norms: torch.Tensor | None = None,
    similarity: str = "cosine",
    across: str = "max",
) -> torch.Tensor:
    """How near each key is to the nearest of some queries, averaged over the group.

    Normalised queries are averaged over the group before they meet a key: products are linear, so this is the mean of
    the heads' scores at the cost of one head.

    Args:
        query: [Hk, G, Q, D].
        keys: [Hk, T, D].
        norms: [Hk, T] of the keys, where they are known.
        similarity: `cosine`, or `dot`, which the paper compares it with.
        across: `max` over the queries, or their `mean`, likewise; `none` keeps them apart.

    Returns:
        [Hk, 1, T] float32, or [Hk, Q, T]. Allocates [Hk, Q, T] float32.
    """
    averaged = (query.float() if similarity == "dot" else normalize(query.float(), dim=-1)).mean(1)
    if across == "mean":
        averaged = averaged.mean(1, keepdim=True)
    scores = products(averaged.to(keys.dtype), keys)
    if across == "max":
        # Before the division: a norm is positive, so the largest product is the largest cosine.
        scores = scores.amax(1, keepdim=True)
    if similarity == "dot":
        return scores
    return scores / (key_norms(keys) if norms is None else norms)[:, None]
