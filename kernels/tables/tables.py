"""Query-centric tables (CSAttention): subspaces of a head, centroids of its queries there, lists of their best keys."""

import torch
from torch.nn.functional import normalize

SCORES_AT_ONCE = 2**22  # elements of the k-means' [B, rows, C] float32 cosines


def rope_pair_order(head_dim: int, pairs: int, *, interleaved: bool) -> torch.Tensor:
    """[D] int64: channels in an order in which those that RoPE turns together are neighbours, fastest pair first.

    Pairs are channels i and i + `pairs`, or 2 i and 2 i + 1 where they are interleaved; the others come after them.
    """
    channels = torch.arange(head_dim)
    if interleaved:
        return channels
    turned = channels[: 2 * pairs].view(2, pairs).T.flatten()
    return torch.cat([turned, channels[2 * pairs :]])


def split_channels(rows: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Parts [..., m, T, D / m] float32 of rows [..., T, D] in the subspaces with channels [m, D / m]."""
    return rows[..., channels.long()].float().transpose(-3, -2)


def cosine_kmeans(points: torch.Tensor, clusters: int, iterations: int, generator: torch.Generator) -> torch.Tensor:
    """Unit centroids of spherical k-means from k-means++ seeds.

    Args:
        points: [B, S, d] float32 of any length; a centroid counts directions alone.
        clusters: C, at most S; a cluster that no point is nearest to keeps its centroid.
        generator: draws the seeds, on the points' device.

    Returns:
        [B, C, d] float32. Allocates the points once more, and 16 MB of cosines at a time.
    """
    points = normalize(points, dim=-1)
    centroids = _seeds(points, clusters, generator)
    for _ in range(iterations):
        labels = nearest(points, centroids)
        sums = torch.zeros_like(centroids).scatter_add_(1, labels[..., None].expand_as(points), points)
        # A sum near zero has no direction: rounding alone would decide it.
        filled = sums.norm(dim=-1, keepdim=True) > 1e-6
        centroids = torch.where(filled, normalize(sums, dim=-1), centroids)
    return centroids


def nearest(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """[B, S] int64: the centroid [B, C, d] of highest product with each point [B, S, d]."""
    rows = max(1, SCORES_AT_ONCE // (centroids.shape[0] * centroids.shape[1]))
    transposed = centroids.transpose(1, 2)
    return torch.cat([(part @ transposed).argmax(-1) for part in points.split(rows, 1)], 1)


def _seeds(points: torch.Tensor, clusters: int, generator: torch.Generator) -> torch.Tensor:
    """k-means++: each next seed is drawn with a probability that grows with its squared distance to those there are."""
    distance = points.new_ones(points.shape[:2])
    seeds = []
    for _ in range(clusters):
        # Where all points are seeds already, any of them is one more.
        ends = distance.double().clamp(min=1e-20).cumsum(-1)
        drawn = torch.rand(len(points), 1, generator=generator, dtype=ends.dtype, device=points.device)
        chosen = torch.searchsorted(ends, drawn * ends[:, -1:], right=True).clamp(max=points.shape[1] - 1)
        seed = points.gather(1, chosen[..., None].expand(-1, -1, points.shape[-1]))
        seeds.append(seed)
        distance = torch.minimum(distance, (2 - 2 * (points @ seed.transpose(1, 2))[..., 0]).clamp(min=0))
    return torch.cat(seeds, 1)


def top_lists(centroids: torch.Tensor, keys: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each centroid's keys of highest product, in order of position.

    Args:
        centroids: [..., C, d]; keys: [..., M, d], both float32.
        length: L, at most M.

    Returns:
        positions [..., C, L] int32 rising along the list, and scores [..., C, L] float16. Allocates [C, M] scores of
        one head and subspace at a time.
    """
    shape = *centroids.shape[:-1], length
    lists = [_top_list(*pair, length) for pair in zip(centroids.flatten(0, -3), keys.flatten(0, -3), strict=True)]
    positions, scores = (torch.stack(parts).view(shape) for parts in zip(*lists, strict=True))
    return positions, scores


def _top_list(centroids: torch.Tensor, keys: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = centroids @ keys.T
    best = scores.topk(length, -1, sorted=False).indices
    # A mask puts them in order of position in one pass, where sorting each list would take several.
    listed = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
    positions = listed.nonzero()[:, 1].view(-1, length)
    return positions.int(), scores.gather(1, positions).half()


def insert(
    tokens: torch.Tensor, scores: torch.Tensor, new_tokens: torch.Tensor, new_scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists after new keys have tried to enter them, each in the place of the lowest score if its own is higher.

    The order in which they try does not matter: what is listed are the highest scores, and of equal ones the first.

    Args:
        tokens, scores: [C, L], positions rising.
        new_tokens: [T], higher than any listed; new_scores: [C, T].

    Returns:
        tokens and scores [C, L], positions rising. Allocates [C, L + T] a few times over.
    """
    length, new = tokens.shape[1], len(new_tokens)
    tokens = torch.cat([tokens, new_tokens.to(tokens).expand(len(tokens), -1)], 1)
    scores = torch.cat([scores, new_scores.to(scores)], 1)
    # What is no number comes last: compared with, it would be neither above nor equal, and a list too short.
    compared = scores.float().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    cutoff = compared.kthvalue(new + 1, -1, keepdim=True).values
    above, equal = compared > cutoff, compared == cutoff
    listed = above | (equal & (equal.cumsum(-1) <= length - above.sum(-1, keepdim=True)))
    return tokens[listed].view(-1, length), scores[listed].view(-1, length)
