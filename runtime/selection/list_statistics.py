"""Statistics of query-centric posting lists: how many keys they hold, and each subspace's share in the ranking."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ListShape:
    """One layer's posting lists, over all KV heads.

    `lists` is their number, `entries` the length of each. `keys_listed` is the share of the middle's keys that are in
    at least one list of their head; `in_lists` the share of its head's lists that a key is in, the (lower) median over
    all keys.

    `subspace_shares` (see the function) are in order of subspace, `ranked_shares` sorted per query from highest to
    lowest; both are means over queries and heads, and each adds up to 1.
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
    """Describe a layer from the artifact's tensors; reads all posting lists and keys, one head and subspace at a time.

    Args:
        keys: [Hk, M, D] of the middle, as attended, in order of position.
        queries: [Hk, G, R, D].
        first_token: position in the prompt of the first middle token.
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
    """Each subspace's share in the ranking of one head's keys: [R, m] float64, each row adds up to 1.

    A logit q k is the sum over subspaces b of q_b k_b. A term that is the same for all keys does not change their
    order, so a subspace counts by the standard deviation of q_b k_b over the keys. Its share is its deviation divided
    by the sum over subspaces; 1 / m for each where all keys are equal.

    The deviation is sqrt(q_b^T V_b q_b) with V_b the keys' covariance, so no logits are made: this allocates one
    subspace's keys [M, D / m] in float64, twice.

    Args:
        queries: [R, D]; keys: [M, D]; channels: [m, D / m] of each subspace.
    """
    deviations = torch.stack([_deviation(queries[:, part], keys[:, part]) for part in channels.long()], -1)
    total = deviations.sum(-1, keepdim=True)
    return torch.where(total > 0, deviations / total, 1 / len(channels))


def _deviation(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[R] float64: the standard deviation of each query's [R, d] products with the keys [M, d]."""
    queries, keys = queries.double(), keys.double()
    keys = keys - keys.mean(0)
    covariance = keys.T @ keys / len(keys)
    return ((queries @ covariance) * queries).sum(-1).clamp(min=0).sqrt()


def _named(lists: torch.Tensor, keys: int, first_token: int) -> torch.Tensor:
    """[M] int64: in how many of one head's posting lists [m, C, L] each key is."""
    counts = [torch.bincount(tokens.flatten() - first_token, minlength=keys) for tokens in lists]
    return torch.stack(counts).sum(0)
