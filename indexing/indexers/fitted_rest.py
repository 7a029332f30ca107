"""What the document's own queries say of its keys: how much each matters, and what clusters stand for once the tokens
that are chosen are attended one by one.

The mean key of a cluster's tokens gives them a smaller mass than they have, because the mean of exponents is above the
exponent of the mean, and a larger one once the tokens of largest exponent are taken out; their mean value is that of
all of them. So mass and value are fitted: over a sample of queries, each of which takes the tokens that are best by
their codes, a cluster's remaining mass and output come out right on average, with what the codes miss in them. Queries
see all of the middle, also what comes after them, and nothing else, as those that are asked later see it; with another
budget than `TAKEN` the fit is an approximation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparsekv.formats.schema import LayerFacts
from sparsekv.kernels.scores.best import best_tokens
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.kernels.scores.softmax import softmax_with_logsumexp

TAKEN = 0.04  # share of the tokens that each query takes
PRIOR = 0.1  # of a cluster's mean mass: how much of it is as the means say
AT_ONCE = 16  # positions whose logits are in memory


@dataclass(frozen=True)
class FittedRest:
    """Log factors [Hk, C] float32 of the clusters' masses, and values [Hk, C, D] in the dtype of the document's."""

    bias: torch.Tensor
    values: torch.Tensor


def attended(keys: torch.Tensor, queries: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
    """[Hk, M] float32: the mean over the queries of the root of each token's share of the attention. The root, because
    a question asks for some tokens that few of the document's queries ask for.

    Allocates three times the logits of `AT_ONCE` positions on all tokens, with a soft cap four times.

    Args: as `fit_rest`'s.
    """
    roots = torch.zeros(keys.shape[:2], device=keys.device)
    for some in queries.split(AT_ONCE, 2):
        shares, _ = softmax_with_logsumexp(attention_logits(some, keys, facts.softmax_scale, facts.softcap))
        roots += shares.mean(1).sqrt_().sum(1)
    return roots / queries.shape[2]


def _chosen(estimates: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The tokens [Hk, P, K] that each position takes by estimated logits [Hk, G, P, M], which are probabilities over
    exact log-sum-exps [Hk, G, P]."""
    weights, estimated_total = softmax_with_logsumexp(estimates)
    # Estimates can be above what is exact by so much that there is no such number.
    weights.mul_((estimated_total - total).clamp(max=60).exp()[..., None])
    return best_tokens(weights.mean(1), max(1, round(TAKEN * estimates.shape[-1])))


def fit_rest(
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
    estimated: Callable[[torch.Tensor], torch.Tensor],
    clusters: dict[str, torch.Tensor],
    labels: torch.Tensor,
    facts: LayerFacts,
) -> FittedRest:
    """Fit masses and values of clusters to queries; see the module.

    Allocates four times the logits of `AT_ONCE` positions on all tokens, with a soft cap five times.

    Args:
        keys, values: [Hk, M, D].
        queries: [Hk, G, P, D].
        estimated: logits [Hk, G, P, M] of such queries by the keys' codes.
        clusters: level0.centroids, level0.value_centroids and level0.counts.
        labels: [Hk, M], each token's cluster.
    """
    centroids, counts = clusters["level0.centroids"], clusters["level0.counts"].float()
    weights = torch.zeros(keys.shape[:2], device=keys.device)  # of each token, over all queries that do not take it
    expected = torch.zeros_like(counts)
    for some in queries.split(AT_ONCE, 2):
        shares, total = softmax_with_logsumexp(attention_logits(some, keys, facts.softmax_scale, facts.softcap))
        best = _chosen(estimated(some), total)
        weights += shares.scatter_(-1, best[:, None].expand(-1, some.shape[1], -1, -1), 0).sum((1, 2))
        of_means = attention_logits(some, centroids, facts.softmax_scale, facts.softcap)
        left = counts[:, None].repeat(1, some.shape[2], 1)
        cluster = labels[:, None].expand(-1, some.shape[2], -1).gather(-1, best)
        left.scatter_add_(-1, cluster, -torch.ones_like(cluster, dtype=left.dtype))
        expected += ((of_means - total[..., None]).exp() * left[:, None]).sum((1, 2))
    masses = torch.zeros_like(counts).scatter_add_(1, labels, weights)
    prior = PRIOR * masses.mean(1, keepdim=True).clamp(min=1e-12)
    outputs = torch.zeros(*counts.shape, values.shape[2], device=values.device)
    outputs.scatter_add_(1, labels[..., None].expand_as(values), weights[..., None] * values.float())
    plain = clusters["level0.value_centroids"].float()
    fitted = (outputs + prior[..., None] * plain) / (masses + prior)[..., None]
    return FittedRest(((masses + prior) / (expected + prior)).log(), fitted.to(values.dtype))
