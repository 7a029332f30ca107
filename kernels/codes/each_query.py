"""Ranks all keys of a head by product codes for several queries, each by itself or all together.

One query looks its products up in tables (`code_ranks.py`); several share what a code stands for, which tensor cores
multiply with all of them.
"""

import torch

from sparsekv.kernels.codes.types import KeyCodes
from sparsekv.kernels.scores.logits import softcapped
from sparsekv.kernels.tables.list_ranks import laid_out
from sparsekv.kernels.tables.types import FRACTION_BITS, RANKS, TokenRanks, lowest_rank


def rank_for_each(
    query: torch.Tensor,
    totals: torch.Tensor,
    codes: KeyCodes,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
    *,
    joint: bool = False,
) -> TokenRanks:
    """Ranks of all keys by estimated attention probability, mean over the group; see `rank_codes`.

    On a GPU two kernels and few operations of torch, no synchronisation.

    Args:
        query: [H, G, T, D].
        totals: [H, G, T] float32, the log-sum-exps that probabilities are relative to.
        wanted: number of keys that will be chosen for each query, or with `joint` for all.
        joint: one rank of a key for all T queries, by the mean over them.

    Returns:
        ranks of H T heads, the T of a head one after another, or with `joint` of H; log-sum-exps are the given ones.
        Allocates a byte a key of each.
    """
    if query.is_cuda:
        from sparsekv.kernels.codes.each_query_triton import rank_for_each_triton

        with torch.cuda.device_of(query):  # Triton launches on the current device, which may be another
            return rank_for_each_triton(query, totals, codes, wanted, softmax_scale, softcap, joint=joint)
    return rank_for_each_reference(query, totals, codes, wanted, softmax_scale, softcap, joint=joint)


def rank_for_each_reference(
    query: torch.Tensor,
    totals: torch.Tensor,
    codes: KeyCodes,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
    *,
    joint: bool = False,
) -> TokenRanks:
    """`rank_for_each` in plain torch."""
    turned = (query.float() @ codes.turn.float()[:, None]).unflatten(-1, (codes.books.shape[1], -1))
    products = torch.einsum("hgtpd,hpcd->hgtpc", turned, codes.books.float())
    names = codes.unpacked().transpose(1, 2)[:, None, None].expand(*products.shape[:3], -1, -1)
    logits = softcapped(products.gather(-1, names).sum(3) * softmax_scale, softcap)
    scores = (logits - totals[..., None]).exp().mean(1)
    scores = scores.mean(1) if joint else scores.flatten(0, 1)
    ranks = (scores.view(torch.int32) >> (23 - FRACTION_BITS)) - lowest_rank(wanted)
    return laid_out(ranks.clamp(0, RANKS - 1), totals.transpose(1, 2).reshape(len(scores), -1))
