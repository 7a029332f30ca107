"""Ranking all keys of a head for one query by its lists, laid out by token: what a choice of the best of them reads."""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from sparsekv.kernels.clusters.cluster_choice import EXPONENT_BITS, least_rank
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.kernels.tables.list_codes import HIGHEST, TILE_TOKENS, ListCodes, unpacked

FRACTION_BITS = 4  # of a score that its rank has: codes have rounded away more than that
BINS = 16  # that ranks are counted in, and ranks in each
RANKS = 2 ** (EXPONENT_BITS + FRACTION_BITS)
assert BINS * BINS == RANKS
LARGEST = 4095  # of a logit as a whole number: of 12 bits, four more are room for one that begins at a fourth bit


@dataclass(frozen=True)
class ExactKeys:
    """Keys [H, E, D] that are attended whatever is chosen: a head's rows are contiguous, heads need not be. `count`
    [1] int32, on their device, is how many of the rows there are; None: all."""

    keys: torch.Tensor
    count: torch.Tensor | None = None


@dataclass(frozen=True)
class TokenRanks:
    """Ranks of `keys` keys of each of H heads, 0 to 255, by how much of the attention is estimated to be theirs.

    ranks [H, tiles, 2, 512] int32, 0 past the last key: of 32 keys that follow each other the ranks are in words
    4 q to 4 q + 3 of both rows of their tile; byte j of word i of row h has that of key 8 j + 2 i + h of them.
    coarse [H, tiles, 16] int32: how many of a tile have a rank of each 16. logsumexp [H, G] float32 of the logits that
    the ranks are by and those of exact keys.
    """

    ranks: torch.Tensor
    coarse: torch.Tensor
    logsumexp: torch.Tensor
    keys: int

    def in_order(self) -> torch.Tensor:
        """[H, keys] int32."""
        bytes_of_words = self.ranks.contiguous().view(torch.uint8).unflatten(-1, (-1, 4, 4))
        by_key: torch.Tensor = bytes_of_words.permute(0, 1, 3, 5, 4, 2).flatten(1)[:, : self.keys].int()
        return by_key


def laid_out(ranks: torch.Tensor, logsumexp: torch.Tensor) -> TokenRanks:
    """`TokenRanks` of ranks [H, keys] int32."""
    keys = ranks.shape[1]
    padded = pad(ranks, (0, -keys % TILE_TOKENS)).unflatten(1, (-1, TILE_TOKENS))
    coarse = torch.zeros(*padded.shape[:2], BINS, dtype=torch.int32, device=ranks.device)
    coarse.scatter_add_(-1, (padded // BINS).long(), torch.ones_like(padded))
    by_byte = padded.byte().unflatten(-1, (-1, 4, 4, 2)).permute(0, 1, 5, 2, 4, 3)
    words = by_byte.reshape(*padded.shape[:2], 2, TILE_TOKENS // 2).view(torch.int32)
    return TokenRanks(words, coarse, logsumexp, keys)


def lowest_rank(wanted: int) -> int:
    """What is subtracted from a float32's leading 13 bits to make ranks of scores."""
    return least_rank(wanted, FRACTION_BITS)


def rank_tokens(
    query: torch.Tensor,
    lists: ListCodes,
    exact: ExactKeys,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> TokenRanks:
    """Ranks by the estimated attention probability, mean over the group; those below 1 / (65536 wanted) are 0.

    A query's part takes the list of its nearest centroid. Logits are sums of lists' codes times whole numbers, 12 bits
    in all, right to a few thousandths of the largest that the query's lists could give; ranks tell scores apart that
    differ by one part in 16. Both are less than what four bits have rounded away. On a GPU three kernels, which have
    each query's probabilities to 8 parts in 100, and no synchronisation.

    Args:
        query: [H, G, D].
        wanted: how many keys are to be chosen.

    Returns:
        See `TokenRanks`. Allocates ranks, one byte a key, and weights of one byte [H, G, M].
    """
    if query.is_cuda:
        from sparsekv.kernels.tables.list_ranks_triton import rank_tokens_triton

        with torch.cuda.device_of(query):  # Triton launches on the current one, which may be another
            return rank_tokens_triton(query, lists, exact, wanted, softmax_scale, softcap)
    return rank_tokens_reference(query, lists, exact, wanted, softmax_scale, softcap)


def rank_tokens_reference(
    query: torch.Tensor,
    lists: ListCodes,
    exact: ExactKeys,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> TokenRanks:
    """`rank_tokens` in plain torch."""
    logits = list_logits(query, lists, softmax_scale, softcap)[..., : lists.keys]
    keys = exact.keys if exact.count is None else exact.keys[:, : int(exact.count)]
    beside = attention_logits(query[:, :, None], keys, softmax_scale, softcap)[:, :, 0].logsumexp(-1)
    logsumexp = torch.logaddexp(logits.logsumexp(-1), beside)
    return ranks_of(logits, logsumexp, wanted)


def ranks_of(logits: torch.Tensor, logsumexp: torch.Tensor, wanted: int) -> TokenRanks:
    """Ranks by logits [H, G, M] and the logarithms [H, G] of what their exponents are divided by, in plain torch."""
    scores = (logits - logsumexp[..., None]).exp().mean(1)
    ranks = (scores.view(torch.int32) >> (23 - FRACTION_BITS)) - lowest_rank(wanted)
    return laid_out(ranks.clamp(0, RANKS - 1), logsumexp)


def list_logits(
    query: torch.Tensor, lists: ListCodes, softmax_scale: float, softcap: float | None = None
) -> torch.Tensor:
    """Logits [H, G, M or more] float32 of queries [H, G, D] as their lists' codes have them."""
    (H, m, C, _), G = lists.codes.shape, query.shape[1]
    parts = query[..., lists.channels.long()].float().transpose(1, 2)
    reach, nearest = (parts @ lists.centroids.transpose(-1, -2)).max(-1)
    reach = (reach.clamp(min=0) if lists.reaching else torch.ones_like(reach)) * lists.weights[:, :, None]
    rows = nearest + C * torch.arange(H * m, device=query.device).view(H, m, 1)
    slopes, origins = (of.flatten()[rows] * reach * softmax_scale for of in (lists.steps, lists.origins))
    size, room = slopes.abs().sum(1), LARGEST // HIGHEST - m
    numbers = (slopes * torch.where(size > 0, room / size, 0)[:, None] + 0.5).floor().int()
    logits = HIGHEST * (-numbers).clamp(min=0).sum(1, dtype=torch.int32)
    base, logits = origins.sum(1) - logits * size / room, logits[..., None]
    words = lists.codes.flatten(0, 2)
    for part in range(m):
        logits = logits + unpacked(words[rows[:, part]]) * numbers[:, part, :, None]
    whole = base[..., None] + logits * (size / room)[..., None]
    assert whole.shape[1] == G
    return whole if softcap is None else softcap * torch.tanh(whole / softcap)
