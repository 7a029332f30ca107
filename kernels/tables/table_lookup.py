"""Logits estimated from query-centric tables (CSAttention, section 3.3) by summing posting lists of nearest centroids.

A list is in order of position and has no key twice, so each subspace adds its list to the logits in one pass without a
sort, and the order of summation is always that of the subspaces.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from sparsekv.kernels.tables.tables import split_channels

RIDGE = 1e-2  # of the mean diagonal of the normal equations in `fit_weights`
SCORINGS = ("mean", "floor", "paper")


@dataclass(frozen=True)
class Tables:
    """The tables of one layer.

    channels [m, D / m]; centroids [Hk, m, C, D / m] float32, unit vectors; tokens and scores [Hk, m, C, L]: the posting
    list of each centroid, with positions in the prompt, where `first_token` is the first of `keys` indexed keys;
    key_mean [Hk, m, D / m]: the mean of all these keys.
    """

    channels: torch.Tensor
    centroids: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor
    key_mean: torch.Tensor
    keys: int
    first_token: int = 0

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor], keys: int, first_token: int) -> "Tables":
        """From the artifact's tensors; copies the centroids and nothing else."""
        return cls(
            channels=tensors["channels"].long(),
            centroids=tensors["centroids"].float(),
            tokens=tensors["table_tokens"],
            scores=tensors["table_scores"],
            key_mean=tensors["key_mean"],
            keys=keys,
            first_token=first_token,
        )


@dataclass(frozen=True)
class Lookup:
    """Parts of queries [Hk, m, R, D / m] with the T nearest centroids of each, nearest [Hk, m, R, T].

    share [Hk, m, R, T] is the weight of each centroid within its part, times the weight of the subspace.
    """

    parts: torch.Tensor
    nearest: torch.Tensor
    share: torch.Tensor


def cosines(tables: Tables, query: torch.Tensor) -> torch.Tensor:
    """Cosines [Hk, m, R, C] of the parts of queries [Hk, R, D] with the centroids."""
    return normalize(split_channels(query, tables.channels), dim=-1) @ tables.centroids.transpose(-1, -2)


def look_up(
    tables: Tables, query: torch.Tensor, backoff: float | None = None, weights: torch.Tensor | None = None
) -> Lookup:
    """Nearest centroids, by cosine, of each part of queries [Hk, R, D].

    Args:
        backoff: a part whose best cosine is below this uses its two nearest centroids, with half the weight each; None:
            one centroid always.
        weights: [Hk, m] of the subspaces; None: all 1.
    """
    best, nearest = cosines(tables, query).topk(1 if backoff is None else min(2, tables.centroids.shape[2]), -1)
    share = torch.ones_like(best)
    if backoff is not None and best.shape[-1] == 2:
        second = torch.where(best[..., :1] < backoff, 0.5, 0.0)
        share = torch.cat([1 - second, second], -1)
    parts = split_channels(query, tables.channels)
    return Lookup(parts, nearest, share if weights is None else share * weights[:, :, None, None])


@dataclass(frozen=True)
class Estimate:
    """One subspace's part of the logits: `floor` [Hk, R] + values [Hk, R, L] for listed tokens [Hk, R, L], and the
    floor alone for all other keys."""

    tokens: torch.Tensor
    values: torch.Tensor
    floor: torch.Tensor


def estimate_part(tables: Tables, lookup: Lookup, part: int, place: int, scoring: str) -> Estimate:
    """One subspace's estimate of its part of q k, without the softmax scale; reads R lists.

    Args:
        place: which of each part's nearest centroids to use.
        scoring: `paper` sums the listed scores, and keys that are not listed count as 0. Otherwise a score is
            multiplied by the projection of the query's part on the centroid, 0 if negative, and keys that are not
            listed get the lowest score of the list (`floor`) or the mean of all that it leaves out (`mean`).
    """
    chosen, share = lookup.nearest[:, part, :, place], lookup.share[:, part, :, place]
    heads = torch.arange(len(chosen), device=chosen.device)[:, None]
    tokens = tables.tokens[heads, part, chosen].long() - tables.first_token
    scores, centroids = tables.scores[heads, part, chosen].float(), tables.centroids[heads, part, chosen]
    other = score_of_others(scores, centroids, tables.key_mean[:, part, None], tables.keys, scoring)
    reach = share if scoring == "paper" else (lookup.parts[:, part] * centroids).sum(-1).clamp(min=0) * share
    return Estimate(tokens, (scores - other[..., None]) * reach[..., None], other * reach)


def score_of_others(
    scores: torch.Tensor, centroids: torch.Tensor, key_mean: torch.Tensor, keys: int, scoring: str
) -> torch.Tensor:
    """Score [...] of the keys that a list leaves out, for lists with scores [..., L] float32.

    Args:
        centroids: [..., d]; key_mean: broadcasts to it, the mean of all `keys` keys.
    """
    if scoring == "paper":
        return torch.zeros_like(scores[..., 0])
    lowest, left = scores.amin(-1), keys - scores.shape[-1]
    if scoring == "mean" and left:
        total = (centroids * key_mean).sum(-1) * keys
        # Rounding of the stored scores could put the mean of the others above the lowest listed score.
        lowest = torch.minimum(lowest, (total - scores.sum(-1)) / left)
    return lowest


def estimate_logits(tables: Tables, lookup: Lookup, scoring: str) -> torch.Tensor:
    """Estimated q k [Hk, R, keys] float32 of queries with all keys, without the softmax scale."""
    Hk, parts, R, places = lookup.nearest.shape
    logits = torch.zeros(Hk, R, tables.keys, device=lookup.nearest.device)
    for part in range(parts):
        for place in range(places):
            found = estimate_part(tables, lookup, part, place, scoring)
            logits.scatter_add_(-1, found.tokens, found.values)
            logits += found.floor[..., None]
    return logits


def centroids_used(tables: Tables, lookup: Lookup, together: int) -> torch.Tensor:
    """Number of lists [Hk, R / together] that each `together` neighbouring queries read, shared lists counted once."""
    Hk, parts, R, places = lookup.nearest.shape
    read = (lookup.share > 0).transpose(1, 2).reshape(Hk, R // together, together, parts, places)
    numbers = lookup.nearest.transpose(1, 2).reshape(read.shape)
    used = torch.zeros(Hk, R // together, parts, tables.centroids.shape[2], device=read.device)
    for place in range(places):
        at = numbers[..., place].transpose(2, 3)
        used.scatter_add_(-1, at, read[..., place].transpose(2, 3).float())
    return (used > 0).sum((-1, -2))


def fit_weights(tables: Tables, query: torch.Tensor, keys: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Subspace weights [Hk, m] that fit the estimates (scoring `mean`) to the true logits of some queries.

    Least squares over all keys, weighted by the square root of their attention; an offset common to all keys of a query
    is ignored, as by the softmax. A ridge term draws the weights to 1.

    Args:
        query: [Hk, R, D]; keys: [Hk, keys, D].

    Returns:
        float32. Allocates [m, R, keys] for one head at a time.
    """
    lookup = look_up(tables, query)
    found = [estimate_part(tables, lookup, part, 0, "mean") for part in range(len(tables.channels))]
    return torch.stack(
        [
            _fit(
                torch.stack([_spread(part.tokens[head], part.values[head], tables.keys) for part in found]),
                query[head].float() @ keys[head].float().T,
                softmax_scale,
            )
            for head in range(len(query))
        ]
    )


def _spread(tokens: torch.Tensor, values: torch.Tensor, keys: int) -> torch.Tensor:
    return torch.zeros(len(tokens), keys, device=values.device).scatter_(-1, tokens, values)


def _fit(estimates: torch.Tensor, logits: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Weights [m] from estimates [m, R, keys] and logits [R, keys]."""
    importance = (logits * softmax_scale).softmax(-1).sqrt()
    importance = importance / importance.sum(-1, keepdim=True)
    centred = estimates - (estimates * importance).sum(-1, keepdim=True)
    missing = logits - (logits * importance).sum(-1, keepdim=True) - centred.sum(0)
    weighted = (centred * importance).flatten(1)
    gram = weighted @ centred.flatten(1).T
    # Of a single key nothing can be told apart: the least ridge then leaves all weights at 1.
    ridge = (RIDGE * gram.diagonal().mean()).clamp(min=torch.finfo(gram.dtype).tiny)
    gram.diagonal().add_(ridge)
    more: torch.Tensor = torch.linalg.solve(gram, weighted @ missing.flatten())
    return 1 + more
