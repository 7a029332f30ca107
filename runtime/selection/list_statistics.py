"""What query-centric lists look like: which keys they name, and how unevenly subspaces decide a ranking."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ListShape:
    """One layer's lists, over all KV heads.

    `lists` are as many, each with so many `entries`. `keys_listed` is the share of the middle's keys that some list of
    their head names; `in_lists` the share of its head's lists that name a key, the (lower) median over all keys.

    `subspace_shares` are a query's shares in order of subspace, `ranked_shares` from its highest to its lowest, both
    the mean over queries and heads. Each adds up to 1.
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
    """Describe a layer from the artifact's tensors; reads all its lists and keys, one head and subspace at a time.

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
    """How much of what ranks one head's keys each subspace gives: [R, m] float64, each row adds up to 1.

    A logit q k is the sum over subspaces b of q_b k_b. What is the same for all keys does not change their order, so a
    subspace counts by the standard deviation of q_b k_b over the keys, and its share is that by the sum of the
    subspaces' deviations. Where all keys are alike nothing ranks them, and each share is 1 / m.

    The deviation is sqrt(q_b^T V_b q_b) with V_b the keys' covariance, so no logits are made: this allocates one
    subspace's keys [M, D / m] in float64, twice.

    Args:
        queries: [R, D]; keys: [M, D]; channels: [m, D / m] of each subspace.
    """
    deviations = torch.stack([_deviation(queries[:, part], keys[:, part]) for part in channels.long()], -1)
    total = deviations.sum(-1, keepdim=True)
    return torch.where(total > 0, deviations / total, 1 / len(channels))


def _deviation(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[R] float64 over keys [M, d] of their products with each of queries [R, d]."""
    queries, keys = queries.double(), keys.double()
    keys = keys - keys.mean(0)
    covariance = keys.T @ keys / len(keys)
    return ((queries @ covariance) * queries).sum(-1).clamp(min=0).sqrt()


def _named(lists: torch.Tensor, keys: int, first_token: int) -> torch.Tensor:
    """[M] int64: how many of one head's lists [m, C, L] name each key."""
    counts = [torch.bincount(tokens.flatten() - first_token, minlength=keys) for tokens in lists]
    return torch.stack(counts).sum(0)
