"""Query-centric posting lists (CSAttention), their layout by token, and logits estimated from them.

A subspace is a group of channels of a head. Each subspace has centroids of queries. The posting list of a centroid
holds the keys that have the highest products with it.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from sparsekv.kernels.kmeans.kmeans import cluster_means, largest_products

SCORES_AT_ONCE = 2**22  # most elements of the [B, rows, C] float32 cosines that k-means allocates at a time


def rope_pair_order(head_dim: int, pairs: int, *, interleaved: bool) -> torch.Tensor:
    """Return a channel order [D] int64 in which the two channels of each RoPE pair are adjacent, fastest pair first.

    A pair is channels i and i + `pairs`, or 2 i and 2 i + 1 if interleaved. Channels that are not rotated come last.
    """
    channels = torch.arange(head_dim)
    if interleaved:
        return channels
    rotated = channels[: 2 * pairs].view(2, pairs).T.flatten()
    return torch.cat([rotated, channels[2 * pairs :]])


def split_channels(rows: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Split rows [..., T, D] into the subspaces of channels [m, D / m]; return [..., m, T, D / m] float32."""
    return rows[..., channels.long()].float().transpose(-3, -2)


def cosine_kmeans(points: torch.Tensor, clusters: int, iterations: int, generator: torch.Generator) -> torch.Tensor:
    """Run spherical k-means from k-means++ seeds; return the unit centroids.

    Args:
        points: [B, S, d] float32, whose norms are ignored.
        clusters: C, at most S; an empty cluster keeps its centroid.
        generator: random generator of the seeds, on the points' device.

    Returns:
        [B, C, d] float32. Allocates up to two copies of the points, and up to 16 MB of cosines at a time.
    """
    points = normalize(points, dim=-1)
    centroids = _seeds(points, clusters, generator)
    for _ in range(iterations):
        labels = nearest(points, centroids)
        # Sums are taken in a fixed order, because atomic adds would give two builds on a GPU different lists.
        means, sizes = cluster_means(points, labels, clusters)
        sums = means * sizes[..., None]
        # The direction of a sum near zero would be only rounding error.
        filled = sums.norm(dim=-1, keepdim=True) > 1e-6
        centroids = torch.where(filled, normalize(sums, dim=-1), centroids)
    return centroids


def nearest(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Find, for each point [B, S, d], the centroid [B, C, d] with the highest product; return indices [B, S] int64."""
    if points.is_cpu:
        return largest_products(points, centroids, centroids.new_zeros(centroids.shape[:2]))
    rows = max(1, SCORES_AT_ONCE // (centroids.shape[0] * centroids.shape[1]))
    transposed = centroids.transpose(1, 2)
    return torch.cat([(part @ transposed).argmax(-1) for part in points.split(rows, 1)], 1)


def _seeds(points: torch.Tensor, clusters: int, generator: torch.Generator) -> torch.Tensor:
    """Draw k-means++ seeds [B, C, d], with probability proportional to the squared distance from the nearest seed."""
    distance = points.new_ones(points.shape[:2])
    seeds = []
    for _ in range(clusters):
        # With the clamp, any point can be drawn again when all points are seeds already.
        ends = distance.double().clamp(min=1e-20).cumsum(-1)
        drawn = torch.rand(len(points), 1, generator=generator, dtype=ends.dtype, device=points.device)
        chosen = torch.searchsorted(ends, drawn * ends[:, -1:], right=True).clamp(max=points.shape[1] - 1)
        seed = points.gather(1, chosen[..., None].expand(-1, -1, points.shape[-1]))
        seeds.append(seed)
        distance = torch.minimum(distance, (2 - 2 * (points @ seed.transpose(1, 2))[..., 0]).clamp(min=0))
    return torch.cat(seeds, 1)


def top_lists(centroids: torch.Tensor, keys: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Build the posting list of each centroid: the keys with the highest products, in order of position.

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
    # A mask yields the keys in order of position in one pass. Sorting each list would take several passes.
    listed = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
    positions = listed.nonzero()[:, 1].view(-1, length)
    return positions.int(), scores.gather(1, positions).half()


def insert(
    tokens: torch.Tensor, scores: torch.Tensor, new_tokens: torch.Tensor, new_scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Insert new keys into posting lists, whose lengths do not change.

    A list keeps the highest scores; among equal scores it keeps the first tokens. So the order of insertion does not
    matter.

    Args:
        tokens, scores: [C, L], tokens ascending.
        new_tokens: [T], larger than all listed tokens; new_scores: [C, T].

    Returns:
        tokens and scores [C, L], tokens ascending. Allocates [C, L + T] a few times.
    """
    length, new = tokens.shape[1], len(new_tokens)
    tokens = torch.cat([tokens, new_tokens.to(tokens).expand(len(tokens), -1)], 1)
    scores = torch.cat([scores, new_scores.to(scores)], 1)
    # NaN counts as the lowest score. NaN compares neither above nor equal, and would make a list too short.
    compared = scores.float().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    cutoff = compared.kthvalue(new + 1, -1, keepdim=True).values
    above, equal = compared > cutoff, compared == cutoff
    listed = above | (equal & (equal.cumsum(-1) <= length - above.sum(-1, keepdim=True)))
    return tokens[listed].view(-1, length), scores[listed].view(-1, length)


RIDGE = 1e-2  # ridge term in `fit_weights`, as a share of the mean diagonal of the normal equations
SCORINGS = ("mean", "floor", "paper")


@dataclass(frozen=True)
class Tables:
    """Posting lists of one layer, with C centroids in each of m subspaces of a head.

    `channels` [m, D / m] are the channels of each subspace. `centroids` [Hk, m, C, D / m] float32 are unit vectors.
    `tokens` and `scores` [Hk, m, C, L] are the posting lists: the L keys that have the highest products with a
    centroid, and these products. Tokens are positions in the prompt. `keys` is the number of indexed keys, and
    `first_token` the position of the first of them. `key_mean` [Hk, m, D / m] is the mean of all indexed keys.
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
        """Build the tables from the artifact's tensors, with centroids in float32 and channels in int64."""
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
    """Nearest centroids of R queries in each of m subspaces.

    `parts` [Hk, m, R, D / m] are the queries' channels in each subspace. `nearest` [Hk, m, R, T] are the indices of the
    T nearest centroids of each such part of a query. `share` [Hk, m, R, T] is the weight of each of these centroids,
    times the weight of the subspace.
    """

    parts: torch.Tensor
    nearest: torch.Tensor
    share: torch.Tensor

    @property
    def reads(self) -> torch.Tensor:
        """Mask [Hk, m, R, T] bool of the lists that are read: lists whose share is not 0. A share may be negative."""
        return self.share != 0


def cosines(tables: Tables, query: torch.Tensor) -> torch.Tensor:
    """Compute the cosines [Hk, m, R, C] of queries [Hk, R, D], cut into subspaces, with each subspace's centroids."""
    return normalize(split_channels(query, tables.channels), dim=-1) @ tables.centroids.transpose(-1, -2)


def look_up(
    tables: Tables, query: torch.Tensor, backoff: float | None = None, weights: torch.Tensor | None = None
) -> Lookup:
    """Find the nearest centroids, by cosine, of each part of queries [Hk, R, D]; a part is a query in one subspace.

    Args:
        backoff: a part whose best cosine is below this value uses its two nearest centroids, if there are two, with
            half the weight each. None: every part uses one centroid.
        weights: [Hk, m], weights of the subspaces; None: all 1.
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
    """One subspace's contribution to the products of R queries with all keys.

    The contribution is `floor` [Hk, R] + `values` [Hk, R, L] for the listed keys, and `floor` for all other keys.
    `tokens` [Hk, R, L] are the listed keys' indices among the indexed keys.
    """

    tokens: torch.Tensor
    values: torch.Tensor
    floor: torch.Tensor


def estimate_part(tables: Tables, lookup: Lookup, part: int, place: int, scoring: str) -> Estimate:
    """Estimate one subspace's contribution to q k, without the softmax scale, from one list of each of R queries.

    The contribution is multiplied by the centroid's `share` in the look-up.

    Args:
        part: index of the subspace.
        place: which of a query's nearest centroids in the subspace to use, 0 for the nearest.
        scoring: with `paper`, a key's contribution is its score in the list, or 0 if it is not listed. With `floor` and
            `mean`, scores are multiplied by the projection of the query on the centroid, or by 0 if the projection is
            negative. The score of keys that are not listed is then the lowest score of the list (`floor`), or the mean
            score of all keys that are not listed (`mean`).
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
    """Compute the score [...] of the keys that are not in a list, for lists with scores [..., L] float32.

    Args:
        centroids: [..., d]; key_mean: the mean of all `keys` keys, which broadcasts to the centroids.
        scoring: see `estimate_part`.
    """
    if scoring == "paper":
        return torch.zeros_like(scores[..., 0])
    lowest, left = scores.amin(-1), keys - scores.shape[-1]
    if scoring == "mean" and left:
        total = (centroids * key_mean).sum(-1) * keys
        # Because stored scores are rounded, the mean of the other keys could exceed the lowest listed score.
        lowest = torch.minimum(lowest, (total - scores.sum(-1)) / left)
    return lowest


def estimate_logits(tables: Tables, lookup: Lookup, scoring: str) -> torch.Tensor:
    """Estimate the products [Hk, R, keys] float32 of queries with all keys, without the softmax scale.

    Each product is the sum of the contributions of `estimate_part`, over all subspaces and all lists of the look-up.
    """
    Hk, parts, R, places = lookup.nearest.shape
    logits = torch.zeros(Hk, R, tables.keys, device=lookup.nearest.device)
    for part in range(parts):
        for place in range(places):
            found = estimate_part(tables, lookup, part, place, scoring)
            logits.scatter_add_(-1, found.tokens, found.values)
            logits += found.floor[..., None]
    return logits


def centroids_used(tables: Tables, lookup: Lookup, together: int) -> torch.Tensor:
    """Count the lists [Hk, R / together] that each `together` consecutive queries read; a shared list counts once."""
    Hk, parts, R, places = lookup.nearest.shape
    read = lookup.reads.transpose(1, 2).reshape(Hk, R // together, together, parts, places)
    numbers = lookup.nearest.transpose(1, 2).reshape(read.shape)
    used = torch.zeros(Hk, R // together, parts, tables.centroids.shape[2], device=read.device)
    for place in range(places):
        at = numbers[..., place].transpose(2, 3)
        used.scatter_add_(-1, at, read[..., place].transpose(2, 3).float())
    return (used > 0).sum((-1, -2))


def fit_weights(tables: Tables, query: torch.Tensor, keys: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Fit subspace weights [Hk, m], so that the estimates (scoring `mean`) match the true logits of R queries.

    This is a least-squares fit over all keys, each weighted by the square root of its attention probability. Like the
    softmax, it ignores an offset that is common to all keys of a query. A ridge term pulls the weights towards 1.

    Args:
        query: [Hk, R, D]; keys: [Hk, keys, D].

    Returns:
        float32. Allocates [m, R, keys] for one head at a time.
    """
    lookup = look_up(tables, query)
    found = [estimate_part(tables, lookup, part, 0, "mean") for part in range(len(tables.channels))]
    nothing = torch.zeros(query.shape[1], tables.keys, device=query.device)
    weights = []
    for head in range(len(query)):
        estimates = torch.stack([nothing.scatter(-1, part.tokens[head], part.values[head]) for part in found])
        weights.append(_fit(estimates, query[head].float() @ keys[head].float().T, softmax_scale))
    return torch.stack(weights)


def _fit(estimates: torch.Tensor, logits: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Fit one weight for each of m subspaces.

    The weighted sum of the subspaces' estimates [m, R, keys] approximates the logits [R, keys], up to a constant per
    query.
    """
    importance = (logits * softmax_scale).softmax(-1).sqrt()
    importance = importance / importance.sum(-1, keepdim=True)
    centred = estimates - (estimates * importance).sum(-1, keepdim=True)
    missing = logits - (logits * importance).sum(-1, keepdim=True) - centred.sum(0)
    weighted = (centred * importance).flatten(1)
    gram = weighted @ centred.flatten(1).T
    # With a single key, the normal equations are zero. The smallest ridge then leaves all weights at 1.
    ridge = (RIDGE * gram.diagonal().mean()).clamp(min=torch.finfo(gram.dtype).tiny)
    gram.diagonal().add_(ridge)
    more: torch.Tensor = torch.linalg.solve(gram, weighted @ missing.flatten())
    return 1 + more


TILE_TOKENS, TILE_WORDS = 4096, 512
HIGHEST = 15  # largest code
# Candidate clipping points, as shares of a list's highest score. Without clipping, a few outliers would leave too few
# codes for all other scores.
CUTS = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True)
class ListCodes:
    """All posting lists of one layer, with a four-bit code for every token.

    `codes` is [Hk, m, C, words] int32. Four words, which a GPU thread reads together, hold the codes of 32 consecutive
    tokens. With j = 2 j1 + j0, the code of token 8 j + 2 i + h of the 32 is in word i from bit 16 j1 + 8 h + 4 j0 on.
    The codes past the last of `keys` keys are the codes of unlisted keys.

    A key's score in a list is origin + step * code, with `origins` and `steps` [Hk, m, C] float32. If `reaching`,
    scores are multiplied by the projection of the query's part on the centroid, at least 0. `centroids` are [Hk, m, C,
    D / m] float32, `channels` [m, D / m] int32, and the subspaces' `weights` [Hk, m] float32.
    """

    codes: torch.Tensor
    origins: torch.Tensor
    steps: torch.Tensor
    reaching: bool
    centroids: torch.Tensor
    channels: torch.Tensor
    weights: torch.Tensor
    keys: int


def encode_lists(tables: Tables, scoring: str, weights: torch.Tensor | None = None) -> ListCodes:
    """Lay out posting lists by token.

    Args:
        scoring: determines the score of keys that are not in a list; see `estimate_part`.
        weights: [Hk, m], weights of the subspaces; None: all 1.

    Returns:
        See `ListCodes`. Allocates half a byte for every key and list. Also allocates about ten bytes for every key and
        list of one subspace of a head at a time.
    """
    Hk, m, C, _ = tables.tokens.shape
    words = -(-tables.keys // TILE_TOKENS) * TILE_WORDS
    codes = torch.empty(Hk, m, C, words, dtype=torch.int32, device=tables.tokens.device)
    origins, steps = torch.empty(2, Hk, m, C, device=codes.device)
    for head in range(Hk):
        for part in range(m):
            scores, centroids = tables.scores[head, part].float(), tables.centroids[head, part]
            other = score_of_others(scores, centroids, tables.key_mean[head, part], tables.keys, scoring)
            origin = torch.minimum(other, scores.amin(-1))
            step = _best_step(scores - origin[:, None])
            dense = _codes(other - origin, step)[:, None].repeat(1, 8 * words)
            tokens = tables.tokens[head, part].long() - tables.first_token
            dense.scatter_(1, tokens, _codes(scores - origin[:, None], step[:, None]))
            codes[head, part], origins[head, part], steps[head, part] = _packed(dense), origin, step
    weights = torch.ones(Hk, m, device=codes.device) if weights is None else weights.float().contiguous()
    centroids, channels = tables.centroids.contiguous(), tables.channels.int().contiguous()
    return ListCodes(codes, origins, steps, scoring != "paper", centroids, channels, weights, tables.keys)


def _codes(heights: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return (heights / step).round().clamp(0, HIGHEST).to(torch.uint8)


def _best_step(heights: torch.Tensor) -> torch.Tensor:
    """Choose the code step [C] with the least squared error for each list; heights [C, L] are scores minus origins."""
    highest = heights.amax(-1).clamp(min=torch.finfo(torch.float16).tiny) / HIGHEST
    steps = torch.stack([highest * cut for cut in CUTS])
    wrong = torch.stack([(_codes(heights, step[:, None]) * step[:, None] - heights).square().sum(-1) for step in steps])
    best: torch.Tensor = steps.gather(0, wrong.argmin(0, keepdim=True))[0]
    return best


def _packed(dense: torch.Tensor) -> torch.Tensor:
    """Pack codes [C, 8 words] into words [C, words] int32."""
    by_place = dense.view(len(dense), -1, 2, 2, 4, 2).int()
    words: torch.Tensor = (by_place << _shifts(dense.device)).sum((2, 3, 5), dtype=torch.int32).flatten(1)
    return words


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Unpack words [..., words] int32 to codes [..., 8 words] int32 in token order."""
    fours = words.unflatten(-1, (-1, 1, 1, 4, 1))
    codes: torch.Tensor = ((fours >> _shifts(words.device)) & HIGHEST).flatten(-5)
    return codes


def _shifts(device: torch.device) -> torch.Tensor:
    """Return the position of each code's lowest bit in its word: [2, 2, 1, 2] int32, by j1, j0 and h (`ListCodes`)."""
    j1, j0, h = torch.arange(2, dtype=torch.int32, device=device).expand(3, 2)
    shifts: torch.Tensor = 16 * j1[:, None, None, None] + 4 * j0[:, None, None] + 8 * h
    return shifts
