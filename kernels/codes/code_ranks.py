"""Ranks all keys of a head for one query by product codes; `top_ranked` chooses by these ranks."""

import math

import torch

from sparsekv.kernels.codes.types import (
    LEVELS,
    PER_OCTAVE,
    CodeRanks,
    LaidOutCodes,
    ProductCodes,
    WeighedClusters,
    padded_clusters,
)
from sparsekv.kernels.scores.logits import attention_logits, softcapped
from sparsekv.kernels.tables.list_ranks import exact_logsumexp, few_ranks_of
from sparsekv.kernels.tables.types import ExactKeys


def rank_codes(
    query: torch.Tensor,
    codes: LaidOutCodes,
    clusters: WeighedClusters,
    exact: ExactKeys,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> CodeRanks:
    """Ranks of all keys by estimated attention probability, mean over the group; below 1 / (65536 wanted) they are 0,
    and from about 1 / wanted on they are equal.

    A logit is the sum over the parts of the products with the centroids that the key's code names, each rounded to a
    byte. Probabilities are relative to the exponentials of the exact keys and what the clusters weigh: an estimate that
    is known before a code is read, so that codes are read once. On a GPU two kernels, no synchronisation.

    Args:
        query: [H, G, D]; or [H T, G, D], T queries for each head of codes, clusters and exact keys, one after another.
        exact: learned sinks are those of each query.
        wanted: number of keys that will be chosen for each.

    Returns:
        See `CodeRanks`, of as many heads as the query. Allocates for each a byte a key, and 1 KB a part for every four
        heads of a group.
    """
    if query.is_cuda:
        from sparsekv.kernels.codes.code_ranks_triton import rank_codes_triton

        with torch.cuda.device_of(query):  # Triton launches on the current device, which may be another
            return rank_codes_triton(query, codes, clusters, exact, wanted, softmax_scale, softcap)
    return rank_codes_reference(query, codes, clusters, exact, wanted, softmax_scale, softcap)


def rank_codes_reference(
    query: torch.Tensor,
    codes: LaidOutCodes,
    clusters: WeighedClusters,
    exact: ExactKeys,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> CodeRanks:
    """`rank_codes` in plain torch."""
    each = len(query) // len(codes.words)
    codes, clusters, exact = codes.repeated(each), clusters.repeated(each), exact.repeated(each)
    logits = attention_logits(query[:, :, None], clusters.keys, softmax_scale, softcap)[:, :, 0]
    logits = logits.masked_fill(clusters.counts[:, None] == 0, -torch.inf)
    masses = (logits + (clusters.counts.log() + clusters.bias)[:, None]).logsumexp(-1)
    beside = exact_logsumexp(query, exact, softmax_scale, softcap)
    ranks = few_ranks_of(code_logits(query, codes, softmax_scale, softcap), torch.logaddexp(masses, beside), wanted)
    return CodeRanks(ranks, padded_clusters(logits), torch.zeros_like(clusters.counts))


def code_logits(
    query: torch.Tensor, codes: ProductCodes, softmax_scale: float, softcap: float | None = None
) -> torch.Tensor:
    """Logits [H, G, M] float32 of queries [H, G, D] on what the codes of all keys stand for, with rounded products."""
    turned = (query.float() @ codes.turn.float()).unflatten(-1, (codes.books.shape[1], -1))
    octaves = torch.einsum("hgpd,hpcd->hgpc", turned, codes.books.float()) * (softmax_scale * math.log2(math.e))
    best = octaves.amax(-1, keepdim=True)
    below = ((best - octaves) * PER_OCTAVE).round().clamp(0, LEVELS)
    names = codes.unpacked().transpose(1, 2)[:, None].expand(-1, query.shape[1], -1, -1)
    logits = (best.sum(2) - below.gather(-1, names).sum(2) / PER_OCTAVE) * math.log(2)
    return softcapped(logits, softcap)
