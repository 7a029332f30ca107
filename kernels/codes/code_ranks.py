"""Ranks of a head's keys by their product codes, for one query or for several queries together."""

import math

import torch

from sparsekv.kernels.codes.types import (
    HEADROOM,
    LEAST_OCTAVES,
    LEVELS,
    STEP_ROOM,
    CodeRanks,
    JoinedKeys,
    KeyCodes,
    LaidOutCodes,
    WeighedClusters,
    padded_clusters,
)
from sparsekv.kernels.common.on_gpu import on_gpu
from sparsekv.kernels.posting_lists.list_ranks import exact_logsumexp, ranks_of
from sparsekv.kernels.posting_lists.types import ExactKeys, KeyGroups, TokenRanks
from sparsekv.kernels.scores.logits import attention_logits, softcapped


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
    turned = (query.float() @ codes.turn.float()).unflatten(-1, (codes.books.shape[1], -1))
    products = torch.einsum("hrpd,hpcd->hrpc", turned, codes.books.float())
    names = codes.unpacked().transpose(1, 2)[:, None].expand(-1, query.shape[1], -1, -1)
    logits = softcapped(products.gather(-1, names).sum(2) * softmax_scale, softcap)
    return ranks_of(logits, totals, max(1, wanted >> HEADROOM))


@on_gpu("sparsekv.kernels.codes.joint_ranks_triton:join_chosen_triton")
def join_chosen(chosen: torch.Tensor, capacity: int, groups: KeyGroups) -> JoinedKeys:
    """Compute the union of the keys that B queries of each head chose, and count the keys of the union by group.

    The counts are added to `groups.taken`; the shape of `groups.labels` gives the number of keys. On a GPU there are
    three kernels, no synchronisation, and the same result in every run. Allocates one byte per key, and the rows.

    Args:
        chosen: [H, B, K] int32 key indices, with duplicates allowed.
        capacity: number of row slots of a head, at least the number of keys in the union.
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


def code_logits(
    query: torch.Tensor, codes: LaidOutCodes, softmax_scale: float, softcap: float | None = None
) -> torch.Tensor:
    """Compute the logits [H, G, M] float32 of queries [H, G, D] for all keys, estimated from their codes.

    The products with centroids are rounded to bytes, in steps of `octaves_of_steps`.
    """
    turned = (query.float() @ codes.turn.float()).unflatten(-1, (codes.books.shape[1], -1))
    octaves = torch.einsum("hgpd,hpcd->hgpc", turned, codes.books.float()) * (softmax_scale * math.log2(math.e))
    best, steps = octaves.amax(-1, keepdim=True), octaves_of_steps(query, codes, softmax_scale)[..., None]
    below = ((best - octaves) / steps[..., None]).round().clamp(0, LEVELS)
    names = codes.unpacked().transpose(1, 2)[:, None].expand(-1, query.shape[1], -1, -1)
    logits = (best.sum(2) - below.gather(-1, names).sum(2) * steps) * math.log(2)
    return softcapped(logits, softcap)


def octaves_of_steps(query: torch.Tensor, codes: LaidOutCodes, softmax_scale: float) -> torch.Tensor:
    """Compute the step [H, G] of each query [H, G, D], in octaves; products with centroids are rounded to such steps.

    The distance of two products of a part is at most the sum, over the part's channels, of the turned query's
    magnitude times the span of the centroids. The largest bound of a query's parts, but at least LEAST_OCTAVES, is
    divided into LEVELS steps. For this bound, the query and the matrix `turn` are truncated to bfloat16, because a GPU
    then multiplies them several times as fast. The factor STEP_ROOM makes up for the truncation.
    """
    turned = (_truncated(query) @ _truncated(codes.turn)).unflatten(-1, (codes.books.shape[1], -1))
    reach = (turned.abs() * codes.spans[:, None]).sum(-1).amax(-1) * (STEP_ROOM * softmax_scale * math.log2(math.e))
    steps: torch.Tensor = reach.clamp(min=LEAST_OCTAVES) / LEVELS
    return steps


def _truncated(tensor: torch.Tensor) -> torch.Tensor:
    """Truncate numbers to the precision of bfloat16; return float32."""
    return (tensor.float().view(torch.int32) & -65536).view(torch.float32)
