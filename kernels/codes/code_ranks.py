"""Product codes of keys in the layouts that kernels read, and the keys' ranks by their codes.

Ranks are for one query or for several queries together. Clusters represent the tokens that are not chosen.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch.nn.functional import pad

from sparsekv.kernels.common.launch import aligned, count_sms, is_hopper
from sparsekv.kernels.common.on_gpu import on_gpu
from sparsekv.kernels.posting_lists.list_ranks import (
    ExactKeys,
    KeyGroups,
    TokenRanks,
    exact_logsumexp,
    ranks_of,
    top_ranked,
)
from sparsekv.kernels.posting_lists.posting_lists import TILE_TOKENS
from sparsekv.kernels.scores.logits import attention_logits, softcapped

CENTROIDS = 256  # centroids of a part, one for each value of a byte
IN_WORD = 4  # codes in an int32 word
HEADS_OF_WORD = 4  # query heads whose products share an int32 word of a table
# A query-centroid product is stored as a byte: its distance below the part's largest product, in steps. Each query head
# has a step of its own, such that LEVELS steps are at least the largest distance. A clamped distance would make keys
# look better than they are: keys with a bias have products that are hundreds of octaves (units of log 2) apart. The
# error of rounding to a step is smaller than the error of the key's code.
LEVELS = 255
LEAST_OCTAVES = 1.0  # lower bound of LEVELS steps, because all products of a query head can be equal
STEP_ROOM = 1.02  # factor of a step for the error of its bound, which is computed from truncated float32 numbers
# Octaves above probability 1 / `wanted` in which ranks still distinguish keys. Without them too many keys could share
# the highest rank, because the total of the softmax is only estimated. The estimate is too small where few keys have
# most of the probability.
HEADROOM = 6


@dataclass(frozen=True)
class ProductCodes(ABC):
    """Product codes of `keys` keys of each of H heads.

    `turn` [H, D, D] is the rotation: the matrix by which queries are multiplied. The products are the rotated queries,
    whose channels are split into m parts. `books` [H, m, 256, D / m] are the centroids of each part. Both tensors
    are contiguous. `words` [H, m / 4, keys or more] int32 holds the codes. Byte b of a key's word p is the key's code
    in part 4 p + b: the index of a centroid. Each subclass defines the order of the keys in `words`.
    """

    turn: torch.Tensor
    books: torch.Tensor
    words: torch.Tensor
    keys: int

    def repeated(self, each: int) -> Self:
        """Repeat each head `each` times."""
        turn, books, words = (one.repeat_interleave(each, 0) for one in (self.turn, self.books, self.words))
        return replace(self, turn=turn, books=books, words=words)

    @abstractmethod
    def in_order(self) -> torch.Tensor:
        """Return the words in the order of the keys."""

    def unpacked(self) -> torch.Tensor:
        """Unpack the words to codes [H, M, m] int64."""
        words = self.in_order()[..., : self.keys, None]
        by_byte = (words >> (8 * torch.arange(IN_WORD, device=words.device))) & 255
        codes: torch.Tensor = by_byte.transpose(2, 3).flatten(1, 2).transpose(1, 2).long()
        return codes


@dataclass(frozen=True)
class KeyCodes(ProductCodes):
    """Product codes whose `words`, four codes each, are in the order of the keys; `words` may have any strides."""

    def in_order(self) -> torch.Tensor:
        return self.words


@dataclass(frozen=True)
class LaidOutCodes(ProductCodes):
    """Product codes in the layout that the scan kernel reads: contiguous words in tiles of 4,096 keys.

    Within every 32 keys, the word of key 8 j + w is at index 4 w + j. Therefore the keys whose ranks share a word of
    `TokenRanks` are adjacent. `spans` [H, m, D / m] float32 are those of the codebooks (`spans_of`).
    """

    spans: torch.Tensor

    def repeated(self, each: int) -> Self:
        return replace(super().repeated(each), spans=self.spans.repeat_interleave(each, 0))

    def in_order(self) -> torch.Tensor:
        words: torch.Tensor = self.words.unflatten(2, (-1, 8, 4)).transpose(3, 4).flatten(2)
        return words


def spans_of(books: torch.Tensor) -> torch.Tensor:
    """Compute each channel's largest minus smallest component of centroids [H, m, C, D / m]: [H, m, D / m] float32."""
    return (books.amax(2) - books.amin(2)).float().contiguous()


def as_stored(codes: torch.Tensor) -> torch.Tensor:
    """View contiguous codes [H, M, m] uint8, with m a multiple of four, as `KeyCodes.words`."""
    return codes.view(torch.int32).transpose(1, 2)


def lay_out_codes(codes: torch.Tensor) -> torch.Tensor:
    """Convert codes [H, M, m] uint8, with m a multiple of four, to `LaidOutCodes.words`; zeros past the last key."""
    padded = pad(codes, (0, 0, 0, -codes.shape[1] % TILE_TOKENS))
    of_32 = padded.view(torch.int32).transpose(1, 2).unflatten(2, (-1, 4, 8))
    words: torch.Tensor = of_32.transpose(3, 4).flatten(2).contiguous()
    return words


@dataclass(frozen=True)
class WeighedClusters:
    """C clusters of each of H heads; every key belongs to one cluster.

    `keys` [H, C, D] are the clusters' mean keys, `counts` [H, C] int32 their numbers of keys. `bias` [H, C] float32 is
    added to the log of the count. All are contiguous within a head; heads may have any stride.
    """

    keys: torch.Tensor
    counts: torch.Tensor
    bias: torch.Tensor

    def repeated(self, each: int) -> "WeighedClusters":
        """Repeat each head `each` times."""
        return WeighedClusters(*(one.repeat_interleave(each, 0) for one in (self.keys, self.counts, self.bias)))


@dataclass(frozen=True)
class CodeRanks:
    """Ranks of all keys by their codes, with the logits of the clusters.

    `logits` [H, G, C or more] float32 is minus infinity for empty clusters and past the last. `taken` [H, C] int32 is
    for `KeyGroups.taken`: it begins as zero, and a choice of keys adds the number of each cluster's chosen keys to it.
    """

    ranks: TokenRanks
    logits: torch.Tensor
    taken: torch.Tensor


@dataclass(frozen=True)
class CodeChoice:
    """Keys chosen by their codes, with the logits of the clusters.

    `chosen` [H, K] int32 are the indices of the chosen keys, in ascending order. `logits` are those of `CodeRanks`.
    `taken` [H, C] int32 counts each cluster's chosen keys. With `ahead`, the rows of the chosen keys are already in the
    L2 cache, and the attention should prefetch its other rows, too (`ScoredCentroids.ahead`).
    """

    chosen: torch.Tensor
    logits: torch.Tensor
    taken: torch.Tensor
    ahead: bool


@dataclass(frozen=True)
class JoinedKeys:
    """Union of the keys that several queries chose.

    `rows` [H, capacity] int32 are the keys' indices in ascending order. The first `used` [H] int32 are valid.
    """

    rows: torch.Tensor
    used: torch.Tensor


def padded_clusters(tensor: torch.Tensor) -> torch.Tensor:
    """Pad [..., C] with minus infinity to a multiple of 16, so that attention can read four elements at a time."""
    size = tensor.shape[-1]
    return pad(tensor, (0, aligned(size) - size), value=-torch.inf)


@on_gpu("sparsekv.kernels.codes.joint_ranks_triton:rank_jointly_triton")
def rank_jointly(
    query: torch.Tensor,
    totals: torch.Tensor,
    codes: KeyCodes,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> TokenRanks:
    """Rank all keys by their attention probability, estimated from their codes and averaged over the queries.

    The estimate is that of `rank_codes`, but products are not rounded to bytes. Ranks distinguish probabilities up to
    about 2 ** `HEADROOM` / wanted. On a GPU there are two kernels, a few torch operations and no synchronisation.

    Args:
        query: [H, R, D], all query heads of a group and all their tokens.
        totals: [H, R] float32, the log-sum-exps that normalise the probabilities.
        codes: stored codes, which are not copied. On a GPU, the number of parts and the channels of a part must be
            powers of two.
        wanted: number of keys that will be chosen.

    Returns:
        Ranks, with `totals` as their log-sum-exps. Allocates one byte per key.
    """
    rotated = (query.float() @ codes.turn.float()).unflatten(-1, (codes.books.shape[1], -1))
    products = torch.einsum("hrpd,hpcd->hrpc", rotated, codes.books.float())
    names = codes.unpacked().transpose(1, 2)[:, None].expand(-1, query.shape[1], -1, -1)
    logits = softcapped(products.gather(-1, names).sum(2) * softmax_scale, softcap)
    return ranks_of(logits, totals, max(1, wanted >> HEADROOM))


@on_gpu("sparsekv.kernels.codes.joint_ranks_triton:join_chosen_triton")
def join_chosen(chosen: torch.Tensor, capacity: int, groups: KeyGroups) -> JoinedKeys:
    """Compute the union of the keys that B queries of each head chose, and count the keys of the union by group.

    The counts are added to `groups.taken`; the shape of `groups.labels` gives the number of keys. On a GPU there are
    three kernels, no synchronisation, and the same result in every run. Allocates one byte per key, and the result.

    Args:
        chosen: [H, B, K] int32 key indices, with duplicates allowed.
        capacity: length of a head's list of key indices in the result, at least the number of keys in the union.
    """
    H, keys = groups.labels.shape
    flags = torch.zeros(H, keys, dtype=torch.int32, device=chosen.device).scatter_(1, chosen.flatten(1).long(), 1)
    groups.taken.scatter_add_(1, groups.labels.long(), flags)
    used, place = flags.sum(1, dtype=torch.int32), flags.cumsum(1) - 1
    rows = torch.zeros(H, capacity + 1, dtype=torch.int32, device=chosen.device)
    every = torch.arange(keys, dtype=torch.int32, device=chosen.device).expand(H, -1)
    rows.scatter_(1, torch.where(flags > 0, place, capacity), every)
    return JoinedKeys(rows[:, :capacity], used)


@on_gpu("sparsekv.kernels.codes.code_ranks_triton:rank_codes_triton")
def rank_codes(
    query: torch.Tensor,
    codes: LaidOutCodes,
    clusters: WeighedClusters,
    exact: ExactKeys,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> CodeRanks:
    """Rank all keys by their attention probability, estimated from their codes and averaged over the query heads.

    Ranks are 0 for probabilities below about 2 ** `HEADROOM` / (65536 wanted). Probabilities above about 2 **
    `HEADROOM` / wanted share the highest rank.

    A key's code selects one centroid in each part of the channels. The key's logit is the sum of the query's products
    with these centroids. Each product is rounded to a byte (`code_logits`). The softmax total is estimated from the
    exact keys and the clusters' weights, before any code is read. Therefore a query reads the codes only once. On a GPU
    there are two kernels and no synchronisation.

    Args:
        query: [H, G, D]; or [H T, G, D] for T queries, of which the T of a head are consecutive.
        codes, clusters: of H heads.
        exact: exact keys; their learned sinks have one row for each query.
        wanted: number of keys that will be chosen for each query.

    Returns:
        See `CodeRanks`, with as many heads as the query. Allocates, for each of these heads, one byte per key, and 1 KB
        per part for every four heads of a group.
    """
    each = len(query) // len(codes.words)
    codes, clusters, exact = codes.repeated(each), clusters.repeated(each), exact.repeated(each)
    logits = attention_logits(query[:, :, None], clusters.keys, softmax_scale, softcap)[:, :, 0]
    logits = logits.masked_fill(clusters.counts[:, None] == 0, -torch.inf)
    masses = (logits + (clusters.counts.log() + clusters.bias)[:, None]).logsumexp(-1)
    beside = exact_logsumexp(query, exact, softmax_scale, softcap)
    estimated, total = code_logits(query, codes, softmax_scale, softcap), torch.logaddexp(masses, beside)
    ranks = ranks_of(estimated, total, max(1, wanted >> HEADROOM), few=True)
    return CodeRanks(ranks, padded_clusters(logits), torch.zeros_like(clusters.counts))


HALVES = (torch.float16, torch.bfloat16)
# Limits of the kernel that chooses keys while it scans. All of its programs, one for each tile, must run at the same
# time: PROGRAMS on each multiprocessor. With fewer than one on each, the scan that has more programs keeps more of the
# GPU busy. The chosen rows must fit in the L2 cache (50 MB on Hopper) beside other data.
MOST_TILES, PROGRAMS, MOST_AHEAD = 64, 2, 24 * 2**20


def _at_once(
    query: torch.Tensor,
    codes: LaidOutCodes,
    clusters: WeighedClusters,
    exact: ExactKeys,
    wanted: int,
    labels: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor] | None,
    *scaling: float | None,
) -> bool:
    """Whether the kernel that chooses keys while it scans supports the arguments."""
    (H, G, D), (documents, parts, _, _), tiles = query.shape, codes.books.shape, codes.words.shape[2] // TILE_TOKENS
    if rows is None or not is_hopper(query.device):
        return False
    row_bytes = D * rows[0].element_size()
    in_half = all(one.dtype in HALVES for one in (query, codes.turn, codes.books, *rows))
    resident = tiles <= MOST_TILES and 1 <= tiles * H / count_sms(query.device) <= PROGRAMS
    in_cache = row_bytes in (128, 256) and 2 * H * wanted * row_bytes <= MOST_AHEAD
    return parts == 8 and G <= HEADS_OF_WORD and documents == H and in_half and resident and in_cache


@on_gpu("sparsekv.kernels.codes.code_choice_triton:best_by_codes_triton", fits=_at_once)
def best_by_codes(
    query: torch.Tensor,
    codes: LaidOutCodes,
    clusters: WeighedClusters,
    exact: ExactKeys,
    wanted: int,
    labels: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor] | None,
    softmax_scale: float,
    softcap: float | None = None,
) -> CodeChoice:
    """Choose the keys with the highest ranks by their codes (`rank_codes`), and count them by cluster.

    On a GPU there are two kernels if the arguments are within the limits above, and otherwise three: those of
    `rank_codes` and `top_ranked`. There is no synchronisation, and the result is the same in every run.

    Args:
        query: [H, G, D].
        exact: exact keys, and learned sinks.
        wanted: K, the number of keys to choose.
        labels: [H, M] int16 or int32, the cluster of each key; the labels of a head are contiguous.
        rows: keys and values [H, M or more, D] of equal strides, to which the query will attend. With two kernels, the
            rows of the chosen keys are prefetched into the L2 cache. None: the rows are not on the GPU, or are int8.
    """
    found = rank_codes(query, codes, clusters, exact, wanted, softmax_scale, softcap)
    chosen = top_ranked(found.ranks, wanted, groups=KeyGroups(labels, found.taken))
    return CodeChoice(chosen, found.logits, found.taken, ahead=False)


def code_logits(
    query: torch.Tensor, codes: LaidOutCodes, softmax_scale: float, softcap: float | None = None
) -> torch.Tensor:
    """Compute the logits [H, G, M] float32 of queries [H, G, D] for all keys, estimated from the keys' codes.

    The products with centroids are rounded to bytes, in the steps that `octaves_of_steps` returns.
    """
    rotated = (query.float() @ codes.turn.float()).unflatten(-1, (codes.books.shape[1], -1))
    octaves = torch.einsum("hgpd,hpcd->hgpc", rotated, codes.books.float()) * (softmax_scale * math.log2(math.e))
    best, steps = octaves.amax(-1, keepdim=True), octaves_of_steps(query, codes, softmax_scale)[..., None]
    below = ((best - octaves) / steps[..., None]).round().clamp(0, LEVELS)
    names = codes.unpacked().transpose(1, 2)[:, None].expand(-1, query.shape[1], -1, -1)
    logits = (best.sum(2) - below.gather(-1, names).sum(2) * steps) * math.log(2)
    return softcapped(logits, softcap)


def octaves_of_steps(query: torch.Tensor, codes: LaidOutCodes, softmax_scale: float) -> torch.Tensor:
    """Compute the step [H, G] of each query [H, G, D], in octaves; products with centroids are rounded to such steps.

    The distance of two products of a part is at most the sum, over the part's channels, of the rotated query's
    magnitude times the span of the centroids. The largest bound of a query's parts, but at least LEAST_OCTAVES, is
    divided into LEVELS steps. For this bound, the query and the matrix `turn` are truncated to bfloat16, because a GPU
    then multiplies them several times as fast. The factor STEP_ROOM makes up for the truncation.
    """
    rotated = (_truncated(query) @ _truncated(codes.turn)).unflatten(-1, (codes.books.shape[1], -1))
    reach = (rotated.abs() * codes.spans[:, None]).sum(-1).amax(-1) * (STEP_ROOM * softmax_scale * math.log2(math.e))
    steps: torch.Tensor = reach.clamp(min=LEAST_OCTAVES) / LEVELS
    return steps


def _truncated(tensor: torch.Tensor) -> torch.Tensor:
    """Truncate numbers to the precision of bfloat16; return float32."""
    return (tensor.float().view(torch.int32) & -65536).view(torch.float32)
