"""Ranks of a head's keys for one query, by posting lists or exact logits, and the choice of the best-ranked keys."""

from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch.nn.functional import pad

from sparsekv.kernels.clusters.cluster_choice import EXPONENT_BITS, least_rank
from sparsekv.kernels.common.on_gpu import on_gpu
from sparsekv.kernels.posting_lists.posting_lists import HIGHEST, TILE_TOKENS, ListCodes, unpacked
from sparsekv.kernels.scores.logits import attention_logits, softcapped

FRACTION_BITS = 4  # fraction bits of a score in its rank; the rounding of codes loses more than the dropped bits
BINS = 16  # number of coarse bins of ranks, and number of ranks in each bin
RANKS = 2 ** (EXPONENT_BITS + FRACTION_BITS)
assert BINS * BINS == RANKS
# If the keys of each rank are counted, ranks are coarser: FEW_RANKS instead of RANKS. A coarse rank spans half an
# octave of scores (an octave is a factor of 2), except for the original ranks from FINE_FROM up to FINE_FROM + FINE.
# There it spans an eighth of an octave, because the last chosen key's original rank is nearly always in this range.
FEW_RANKS, FINE_FROM, FINE = 64, 36, 85
LARGEST = 4095  # largest sum of weighted codes, with 12 bits, so that a sum shifted up by four bits fits in 16 bits


@dataclass(frozen=True)
class ExactKeys:
    """Keys [H, E, D] that are always attended; the rows of a head are contiguous, and heads may have any stride.

    The first `count` [1] int32, on the keys' device, of the E rows are valid, or all if `count` is None. `sinks` [H, G]
    are learned logits in the same softmax; None: the model has none.
    """

    keys: torch.Tensor
    count: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    def repeated(self, each: int) -> "ExactKeys":
        """Repeat each head's keys `each` times; `sinks` must already be [H * each, G], and are passed on unchanged."""
        return ExactKeys(self.keys.repeat_interleave(each, 0), self.count, self.sinks)


@dataclass(frozen=True)
class KeyGroups:
    """Groups of keys, such as clusters, and counters of the chosen keys of each group.

    `labels` [H, M] int16 or int32 is the group of each key. The labels of a head are contiguous; heads may have any
    stride. A function that chooses keys adds the number of chosen keys of each group to `taken` [H, C] int32.
    """

    labels: torch.Tensor
    taken: torch.Tensor


@dataclass(frozen=True)
class TokenRanks:
    """Ranks, 0 to 255 or 0 to 63, of `keys` keys of each of H heads by their attention probability, estimated or exact.

    `ranks` is [H, tiles, 2, 512] int32 for tiles of 4,096 keys, with rank 0 past the last key. Keys 32 q to 32 q + 31
    of a tile have their ranks in words 4 q to 4 q + 3 of both rows. Byte j of word 4 q + i of row h is the rank of key
    8 j + 2 i + h of these 32.

    `coarse` counts the ranks of each tile. For ranks 0 to 255 it is [H, tiles, 16] int32, with bins of 16 ranks. For
    ranks 0 to 63 it is [H, tiles, 32] int32, with a count for each rank. The count of an even rank is in a word's lower
    16 bits, that of the next rank in the upper 16 bits.

    `logsumexp` [H, G] float32 are the log-sum-exps of the query heads' logits, which normalise the probabilities.
    """

    ranks: torch.Tensor
    coarse: torch.Tensor
    logsumexp: torch.Tensor
    keys: int

    def each_counted(self) -> bool:
        """Whether `coarse` has a count for each rank."""
        return self.coarse.shape[2] == FEW_RANKS // 2

    def in_order(self) -> torch.Tensor:
        """Unpack the ranks to [H, keys] int32 in the order of the keys."""
        bytes_of_words = self.ranks.contiguous().view(torch.uint8).unflatten(-1, (-1, 4, 4))
        by_key: torch.Tensor = bytes_of_words.permute(0, 1, 3, 5, 4, 2).flatten(1)[:, : self.keys].int()
        return by_key


def fewer_ranks(ranks: torch.Tensor) -> torch.Tensor:
    """Convert ranks below `RANKS` to ranks below `FEW_RANKS`."""
    fewer: torch.Tensor = (ranks + 3 * (ranks - FINE_FROM).clamp(0, FINE) + 1) >> 3
    return fewer


def lowest_rank(wanted: int) -> int:
    """Return the offset to subtract from the leading 13 bits of a float32 score to get its rank.

    `wanted` is the number of keys to choose, the budget of `least_rank`.
    """
    return least_rank(wanted, FRACTION_BITS)


@on_gpu("sparsekv.kernels.posting_lists.top_ranks_triton:top_ranked_triton", tensor=attrgetter("ranks"))
def top_ranked(
    ranked: TokenRanks, wanted: int, names: torch.Tensor | None = None, groups: KeyGroups | None = None
) -> torch.Tensor:
    """Choose the `wanted` keys with the highest ranks in each head; among equal ranks, the first keys.

    On a GPU there are two kernels, or one kernel if each rank has a count. There is no synchronisation, and the result
    is the same in every run.

    Args:
        wanted: K, at most the number of keys.
        names: [H, keys] int32, returned instead of the keys' indices.
        groups: groups in which chosen keys are counted; their labels are indexed by names, if there are names.

    Returns:
        [H, K] int32 indices or names, in the order of the keys.
    """
    order = ranked.in_order().argsort(dim=-1, descending=True, stable=True)
    best = order[:, :wanted].sort(-1).values
    chosen = best.int() if names is None else names.gather(1, best)
    if groups is not None:
        of_each = groups.labels.gather(1, chosen.long()).long()
        groups.taken.scatter_add_(1, of_each, torch.ones_like(chosen))
    return chosen


def laid_out(ranks: torch.Tensor, logsumexp: torch.Tensor, *, few: bool = False) -> TokenRanks:
    """Convert ranks [H, keys] int32 to `TokenRanks`; with `few`, ranks are below `FEW_RANKS`, with a count for each."""
    keys = ranks.shape[1]
    padded = pad(ranks, (0, -keys % TILE_TOKENS)).unflatten(1, (-1, TILE_TOKENS))
    coarse = _counts(padded, FEW_RANKS) if few else _counts(padded // BINS, BINS)
    if few:
        coarse = coarse[..., ::2] | (coarse[..., 1::2] << 16)
    by_byte = padded.byte().unflatten(-1, (-1, 4, 4, 2)).permute(0, 1, 5, 2, 4, 3)
    words = by_byte.reshape(*padded.shape[:2], 2, TILE_TOKENS // 2).view(torch.int32)
    return TokenRanks(words, coarse, logsumexp, keys)


def _counts(numbers: torch.Tensor, bins: int) -> torch.Tensor:
    """Count how often each value below `bins` occurs along the last axis; return [..., bins] int32."""
    counts = torch.zeros(*numbers.shape[:-1], bins, dtype=torch.int32, device=numbers.device)
    return counts.scatter_add_(-1, numbers.long(), torch.ones_like(numbers))


@on_gpu("sparsekv.kernels.posting_lists.list_ranks_triton:rank_tokens_triton")
def rank_tokens(
    query: torch.Tensor,
    lists: ListCodes,
    exact: ExactKeys,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> TokenRanks:
    """Rank all keys by their attention probability, estimated from posting lists and averaged over the query heads.

    In each subspace, a query uses the list of its nearest centroid. Ranks are 0 for probabilities below about 1 /
    (65536 wanted). On a GPU there are three kernels and no synchronisation.

    The lists hold four-bit codes of scores. All other errors are smaller than those of the codes. Logits are 12-bit
    sums of codes times integers, with an error of a few thousandths of the largest logit that the query's lists could
    give. Ranks distinguish probabilities that differ by one part in 16. On a GPU, the probability for each query head
    has a relative error of up to 8%.

    Args:
        query: [H, G, D].
        exact: keys that are always attended, and learned sinks, which take part in the softmax.
        wanted: number of keys that will be chosen.

    Returns:
        See `TokenRanks`. On a GPU, allocates one byte per key for the ranks, and one byte per key and query head.
    """
    logits = list_logits(query, lists, softmax_scale, softcap)[..., : lists.keys]
    beside = exact_logsumexp(query, exact, softmax_scale, softcap)
    return ranks_of(logits, torch.logaddexp(logits.logsumexp(-1), beside), wanted)


def exact_logsumexp(
    query: torch.Tensor, exact: ExactKeys, softmax_scale: float, softcap: float | None = None
) -> torch.Tensor:
    """Compute the log-sum-exp [H, G] of the logits of queries [H, G, D] for exact keys and sinks, in plain torch."""
    keys = exact.keys if exact.count is None else exact.keys[:, : int(exact.count)]
    beside = attention_logits(query[:, :, None], keys, softmax_scale, softcap)[:, :, 0].logsumexp(-1)
    return beside if exact.sinks is None else torch.logaddexp(beside, exact.sinks.float())


def ranks_of(logits: torch.Tensor, logsumexp: torch.Tensor, wanted: int, *, few: bool = False) -> TokenRanks:
    """Compute ranks from logits [H, G, M] and the log-sum-exps [H, G] that normalise them, in plain torch.

    `wanted` is the number of keys that will be chosen. With `few`, there are `FEW_RANKS` ranks, with a count for each.
    """
    scores = (logits - logsumexp[..., None]).exp().mean(1)
    ranks = ((scores.view(torch.int32) >> (23 - FRACTION_BITS)) - lowest_rank(wanted)).clamp(0, RANKS - 1)
    return laid_out(fewer_ranks(ranks) if few else ranks, logsumexp, few=few)


def list_logits(
    query: torch.Tensor, lists: ListCodes, softmax_scale: float, softcap: float | None = None
) -> torch.Tensor:
    """Estimate the logits [H, G, M or more] float32 of queries [H, G, D] from the lists of their nearest centroids."""
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
    return softcapped(whole, softcap)


@on_gpu("sparsekv.kernels.posting_lists.top_ranks_triton:rank_rows_triton")
def rank_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    rows: torch.Tensor,
    logsumexp: torch.Tensor,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> TokenRanks:
    """Rank rows by their exact attention probability, averaged over the query heads.

    Ranks are as in `rank_tokens`. On a GPU there are two kernels and no synchronisation. The plain-torch implementation
    copies the keys.

    Args:
        query: [H, G, D].
        keys: [H, M, D], contiguous within a head.
        rows: [H, S] int32, indices of the keys to rank.
        logsumexp: [H, G] float32, an estimate over all keys, which normalises the probabilities. An estimate below the
            log-sum-exp of the rows' logits is raised to that value. If all G estimates of a head are then above that
            value, all are lowered by the smallest of the G differences. The order of the rows stays the same, and rows
            of small probability have different ranks.
        wanted: number of rows that will be chosen.

    Returns:
        See `TokenRanks`, with S keys; its log-sum-exps are the raised estimates, not lowered. Allocates logits
        [H, G, S] float32.
    """
    gathered = keys.gather(1, rows.long()[..., None].expand(-1, -1, keys.shape[2]))
    logits = attention_logits(query[:, :, None], gathered, softmax_scale, softcap)[:, :, 0]
    of_rows = logits.logsumexp(-1)
    totals = torch.maximum(logsumexp, of_rows)
    excess = (totals - of_rows).amin(1, keepdim=True)
    return replace(ranks_of(logits, totals - excess, wanted), logsumexp=totals)
