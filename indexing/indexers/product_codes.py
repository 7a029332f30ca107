"""Product quantisation of keys: training of codebooks, and a linear transform fitted to the document's queries.

Clusters represent the tokens that a query does not select. A cluster's mass (its share of the attention) and its value
are fitted to the document's queries, too.
"""

import math
from collections.abc import Callable

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import LayerFacts
from sparsekv.indexing.indexers.interface import Tensors
from sparsekv.kernels.kmeans.kmeans import assign, moved_centres, random_points
from sparsekv.kernels.scores.logits import attention_logits, best_tokens, softmax_with_logsumexp

TAKEN = 0.04  # share of the tokens that each query selects
PRIOR = 0.1  # weight of the unfitted centroids in the fit, as a share of the mean mass of a head's clusters
AT_ONCE = 16  # positions whose logits are in memory at a time


def attended(keys: torch.Tensor, queries: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
    """Compute the square root of each token's attention weight, averaged over the queries' positions: [Hk, M] float32.

    The attention weight of a position is the mean over the query heads of a KV head. The root gives more weight to
    tokens that only few of the document's queries attend to, because a question may need these tokens. Allocates three
    times the logits of `AT_ONCE` positions for all tokens; with a soft cap, four times.

    Args:
        keys: [Hk, M, D].
        queries: [Hk, G, P, D], the document's queries at P sampled positions.
    """
    roots = torch.zeros(keys.shape[:2], device=keys.device)
    for some in queries.split(AT_ONCE, 2):
        shares, _ = softmax_with_logsumexp(attention_logits(some, keys, *facts.scaling))
        roots += shares.mean(1).sqrt_().sum(1)
    return roots / queries.shape[2]


def _chosen(estimates: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Select the best tokens [Hk, P, K] of each position by estimated logits [Hk, G, P, M]; K is TAKEN * M.

    The exact log-sum-exps `total` [Hk, G, P] convert the estimated logits to probabilities.
    """
    weights, estimated_total = softmax_with_logsumexp(estimates)
    # Estimates can exceed the exact logits by so much that the exponential would overflow.
    weights.mul_((estimated_total - total).clamp(max=60).exp()[..., None])
    return best_tokens(weights.mean(1), max(1, round(TAKEN * estimates.shape[-1])))


def fit_rest(
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
    estimated: Callable[[torch.Tensor], torch.Tensor],
    clusters: Tensors,
    labels: torch.Tensor,
    facts: LayerFacts,
) -> Tensors:
    """Fit masses and values of clusters, by which queries attend to the tokens that they do not select.

    A cluster's mass is the attention that its unselected tokens get. The estimated mass follows from the centroid and
    the number of unselected tokens. rest_bias [Hk, C] float32 is the log of the ratio of the fitted mass to the
    estimated mass. rest_values [Hk, C, D], in the dtype of the values, are the fitted values. Both are returned.
    Allocates four times the logits of `AT_ONCE` positions for all tokens; with a soft cap, five times.

    Args:
        keys, values: [Hk, M, D].
        queries: [Hk, G, P, D], the document's queries at P sampled positions.
        estimated: returns logits [Hk, G, P, M] of queries, estimated from the keys' codes.
        clusters: level0.centroids, level0.value_centroids and level0.counts.
        labels: [Hk, M], the cluster of each token.
    """
    centroids, counts = clusters["level0.centroids"], clusters["level0.counts"].float()
    weights = torch.zeros(
        keys.shape[:2], device=keys.device
    )  # attention to each token by queries that do not select the token
    expected = torch.zeros_like(counts)
    for some in queries.split(AT_ONCE, 2):
        shares, total = softmax_with_logsumexp(attention_logits(some, keys, *facts.scaling))
        best = _chosen(estimated(some), total)
        weights += shares.scatter_(-1, best[:, None].expand(-1, some.shape[1], -1, -1), 0).sum((1, 2))
        of_means = attention_logits(some, centroids, *facts.scaling)
        left = counts[:, None].repeat(1, some.shape[2], 1)
        cluster = labels[:, None].expand(-1, some.shape[2], -1).gather(-1, best)
        left.scatter_add_(-1, cluster, -torch.ones_like(cluster, dtype=left.dtype))
        # A mean's logit is at most the total. The zeros of an empty cluster's mean may have a logit that is far above.
        expected += ((of_means - total[..., None]).clamp(max=0).exp() * left[:, None]).sum((1, 2))
    masses = torch.zeros_like(counts).scatter_add_(1, labels, weights)
    prior = PRIOR * masses.mean(1, keepdim=True).clamp(min=1e-12)
    outputs = torch.zeros(*counts.shape, values.shape[2], device=values.device)
    outputs.scatter_add_(1, labels[..., None].expand_as(values), weights[..., None] * values.float())
    plain = clusters["level0.value_centroids"].float()
    fitted = (outputs + prior[..., None] * plain) / (masses + prior)[..., None]
    return {"rest_bias": ((masses + prior) / (expected + prior)).log(), "rest_values": fitted.to(values.dtype)}


SHRINK = 0.3  # shrinkage of the queries' second moments to isotropy, because a sample estimates rare directions badly


def query_turn(keys: torch.Tensor, queries: torch.Tensor, parts: int, weights: torch.Tensor) -> torch.Tensor:
    """Fit the matrix [Hk, D, D] float16 by which queries are multiplied for their products with quantised keys.

    Before the quantisation, keys are multiplied by `key_turn` of this matrix, and so the products do not change. The
    matrix is such that quantisation errors of the keys change the products least. Allocates three float32 copies of the
    keys.

    Args:
        keys: [Hk, M, D].
        queries: [Hk, P, D], a sample of all heads of a group.
        parts: number of parts of neighbouring channels that a key is cut into.
        weights: [Hk, M], above 0, weights of the keys' quantisation errors.
    """
    (root, inverse), shares = _roots(queries.float()), weights / weights.sum(1, keepdim=True)
    transformed = keys.float() @ root
    transformed -= shares[:, None] @ transformed
    variances, directions = torch.linalg.eigh(transformed.transpose(1, 2) @ (shares[..., None] * transformed))
    # The sign of an eigenvector may depend on rounding. The largest component of each eigenvector is made positive, so
    # that codes are the same on every machine.
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    directions = directions * largest.sign()
    dealt = torch.stack([_deal(of_head, parts) for of_head in variances]).to(keys.device)
    directions = directions.gather(2, dealt[:, None].expand_as(directions))
    # The matrix of the queries contains the inverse of the root. The directions are orthogonal, and so they need no
    # inverse.
    turn: torch.Tensor = (inverse @ directions).half()
    return turn


def key_turn(turn: torch.Tensor) -> torch.Tensor:
    """Compute the matrix [Hk, D, D] float32 by which keys are multiplied if queries are multiplied by `turn`."""
    # QR, because a batched LU of more than 128 channels hangs with several MKL threads.
    orthogonal, triangle = torch.linalg.qr(turn.double())
    inverse: torch.Tensor = torch.linalg.solve_triangular(triangle.transpose(1, 2), orthogonal, upper=False, left=False)
    return inverse.float()


def _roots(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the symmetric square root [Hk, D, D] of the queries' second-moment matrix, and the root's inverse.

    The matrix is scaled to a mean variance of 1, and shrunk to the identity by SHRINK.
    """
    moments = queries.transpose(1, 2) @ queries
    even = torch.eye(queries.shape[2], device=queries.device)
    # If all queries of a head are 0, the head's matrix is SHRINK times the identity.
    size = moments.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None].clamp(min=1e-12)
    variances, directions = torch.linalg.eigh((1 - SHRINK) * moments / size + SHRINK * even)
    # Variances are at least SHRINK, except for rounding errors.
    deviations = variances.clamp(min=SHRINK / 2).sqrt()[..., None]
    back = directions.transpose(1, 2)
    return directions @ (deviations * back), directions @ (back / deviations)


def _deal(variances: torch.Tensor, parts: int) -> torch.Tensor:
    """Assign components to parts, given their variances [D] in ascending order; return indices [D] part by part.

    Components are assigned in descending order of variance. Each goes to the part with the smallest product of
    variances among the parts that are not full.
    """
    room = len(variances) // parts
    logs = variances.clamp(min=1e-12).log().tolist()
    least, dealt, products = logs[0], [list[int]() for _ in range(parts)], [0.0] * parts
    for number in reversed(range(len(logs))):
        part = min((part for part in range(parts) if len(dealt[part]) < room), key=lambda part: products[part])
        dealt[part].append(number)
        products[part] += logs[number] - least + math.ulp(1.0)
    return torch.tensor([number for part in dealt for number in part])


CODES = 256  # centroids of a part, one for each value of a byte


def check_parts(option: str, parts: int, head_dim: int) -> None:
    """Raise UsageError unless a head's channels divide evenly into `parts`."""
    if head_dim % parts:
        raise UsageError(f"{option} {parts}: the model's heads have {head_dim} channels; give a divisor of {head_dim}")


def train_codebooks(
    keys: torch.Tensor, parts: int, iterations: int, seed: int, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Train centroids [Hk, m, C, D / m] float16 of each part by k-means over keys [Hk, M, D]; C is min(256, M).

    A part is D / m neighbouring channels, and is clustered on its own. The parts of all heads are clustered together in
    batched products. Allocates up to three float32 copies of the keys.

    Args:
        weights: [Hk, M], above 0, weights of the keys' quantisation errors; None: equal weights.
    """
    points = _parts(keys, parts)
    of_parts = None if weights is None else weights.repeat_interleave(parts, 0)
    generator = torch.Generator(points.device).manual_seed(seed)
    first = random_points(points, min(CODES, keys.shape[1]), generator, weights=of_parts)
    # k-means usually ends with an assignment. Here one more update of the centroids replaces this assignment, because
    # codes are later assigned to the rounded centroids.
    _, books = moved_centres(points, first, iterations + 1, of_parts)
    return books.view(len(keys), parts, -1, points.shape[2]).half()


def encode(keys: torch.Tensor, codebooks: torch.Tensor) -> torch.Tensor:
    """Encode keys [Hk, M, D] as codes [Hk, M, m] uint8: the index of each part's nearest centroid."""
    Hk, parts = codebooks.shape[:2]
    nearest = assign(_parts(keys, parts), codebooks.float().flatten(0, 1))
    return nearest.view(Hk, parts, -1).transpose(1, 2).byte().contiguous()


def decode(codes: torch.Tensor, codebooks: torch.Tensor) -> torch.Tensor:
    """Decode codes [Hk, M, m] to keys [Hk, M, D] float32."""
    named = codes.transpose(1, 2).long()[..., None].expand(-1, -1, -1, codebooks.shape[3])
    return codebooks.float().gather(2, named).transpose(1, 2).flatten(2)


def _parts(keys: torch.Tensor, parts: int) -> torch.Tensor:
    """Cut keys [Hk, M, D] into parts of neighbouring channels: [Hk * m, M, D / m] float32."""
    Hk, M, D = keys.shape
    return keys.float().view(Hk, M, parts, D // parts).transpose(1, 2).flatten(0, 1)
