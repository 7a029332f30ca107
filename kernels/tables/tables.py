"""Query-centric tables (CSAttention): per subspace of a head, centroids of its queries and lists of their best keys."""

import torch
from torch.nn.functional import normalize

SCORES_AT_ONCE = 2**22  # elements of the [B, rows, C] float32 cosines that k-means allocates at a time


def rope_pair_order(head_dim: int, pairs: int, *, interleaved: bool) -> torch.Tensor:
    """Channel order [D] int64 in which the two channels of each RoPE pair are neighbours, fastest pair first.

    Pairs are channels i and i + `pairs`, or 2 i and 2 i + 1 if interleaved; channels that are not rotated come last.
    """
    channels = torch.arange(head_dim)
    if interleaved:
        return channels
    turned = channels[: 2 * pairs].view(2, pairs).T.flatten()
    return torch.cat([turned, channels[2 * pairs :]])


def split_channels(rows: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Parts [..., m, T, D / m] float32 of rows [..., T, D], one for each subspace of channels [m, D / m]."""
    return rows[..., channels.long()].float().transpose(-3, -2)


def cosine_kmeans(points: torch.Tensor, clusters: int, iterations: int, generator: torch.Generator) -> torch.Tensor:
    """Unit centroids of spherical k-means from k-means++ seeds.

    Args:
        points: [B, S, d] float32, whose norms are ignored.
        clusters: C, at most S; an empty cluster keeps its centroid.
        generator: draws the seeds, on the points' device.

    Returns:
        [B, C, d] float32. Allocates the points once more, and 16 MB of cosines at a time.
    """
    points = normalize(points, dim=-1)
    centroids = _seeds(points, clusters, generator)
    for _ in range(iterations):
        labels = nearest(points, centroids)
        sums = torch.zeros_like(centroids).scatter_add_(1, labels[..., None].expand_as(points), points)
        # The direction of a sum near zero would be rounding error.
        filled = sums.norm(dim=-1, keepdim=True) > 1e-6
        centroids = torch.where(filled, normalize(sums, dim=-1), centroids)
    return centroids


def nearest(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Index [B, S] int64 of the centroid [B, C, d] that has the highest product with each point [B, S, d]."""
    rows = max(1, SCORES_AT_ONCE // (centroids.shape[0] * centroids.shape[1]))
    transposed = centroids.transpose(1, 2)
    return torch.cat([(part @ transposed).argmax(-1) for part in points.split(rows, 1)], 1)


def _seeds(points: torch.Tensor, clusters: int, generator: torch.Generator) -> torch.Tensor:
    """k-means++ seeds [B, C, d], drawn with probability proportional to squared distance from the nearest earlier."""
    distance = points.new_ones(points.shape[:2])
    seeds = []
    for _ in range(clusters):
        # The clamp lets any point be drawn again when all of them are seeds.
        ends = distance.double().clamp(min=1e-20).cumsum(-1)
        drawn = torch.rand(len(points), 1, generator=generator, dtype=ends.dtype, device=points.device)
        chosen = torch.searchsorted(ends, drawn * ends[:, -1:], right=True).clamp(max=points.shape[1] - 1)
        seed = points.gather(1, chosen[..., None].expand(-1, -1, points.shape[-1]))
        seeds.append(seed)
        distance = torch.minimum(distance, (2 - 2 * (points @ seed.transpose(1, 2))[..., 0]).clamp(min=0))
    return torch.cat(seeds, 1)


def top_lists(centroids: torch.Tensor, keys: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Posting list of each centroid: the keys of highest product with it, in order of position.

    Args:
        centroids: [..., C, d]; keys: [..., M, d], both float32.
        length: L, at most M.

    Returns:
        positions [..., C, L] int32, ascending along the list, and scores [..., C, L] float16. Allocates [C, M] scores
        of one head and subspace at a time.
    """
    shape = *centroids.shape[:-1], length
    lists = [_top_list(*pair, length) for pair in zip(centroids.flatten(0, -3), keys.flatten(0, -3), strict=True)]
    positions, scores = (torch.stack(parts).view(shape) for parts in zip(*lists, strict=True))
    return positions, scores


def _top_list(centroids: torch.Tensor, keys: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = centroids @ keys.T
    best = scores.topk(length, -1, sorted=False).indices
    # A mask gives them in order of position in one pass; sorting each list would take several.
    listed = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
    positions = listed.nonzero()[:, 1].view(-1, length)
    return positions.int(), scores.gather(1, positions).half()


def insert(
    tokens: torch.Tensor, scores: torch.Tensor, new_tokens: torch.Tensor, new_scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Posting lists after inserting new keys, each of which replaces the lowest score of a list if its own is higher.

    The order of insertion does not matter: a list keeps the highest scores, and of equal ones the first tokens.

    Args:
        tokens, scores: [C, L], tokens ascending.
        new_tokens: [T], larger than any listed; new_scores: [C, T].

    Returns:
        tokens and scores [C, L], tokens ascending. Allocates [C, L + T] a few times over.
    """
    length, new = tokens.shape[1], len(new_tokens)
    tokens = torch.cat([tokens, new_tokens.to(tokens).expand(len(tokens), -1)], 1)
    scores = torch.cat([scores, new_scores.to(scores)], 1)
    # NaN counts as the lowest score: it compares neither above nor equal, and would leave a list too short.
    compared = scores.float().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    cutoff = compared.kthvalue(new + 1, -1, keepdim=True).values
    above, equal = compared > cutoff, compared == cutoff
    listed = above | (equal & (equal.cumsum(-1) <= length - above.sum(-1, keepdim=True)))
    return tokens[listed].view(-1, length), scores[listed].view(-1, length)
