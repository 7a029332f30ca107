"""Ranks all keys of a head by product codes for several queries together, such as a question's.

A query by itself looks its products up in tables (`code_ranks.py`). Here what a code stands for is put together once,
and tensor cores multiply it with all queries.
"""

import torch

from sparsekv.kernels.codes.types import HEADROOM, KeyCodes
from sparsekv.kernels.scores.logits import softcapped
from sparsekv.kernels.tables.list_ranks import ranks_of
from sparsekv.kernels.tables.types import TokenRanks


def rank_jointly(
    query: torch.Tensor,
    totals: torch.Tensor,
    codes: KeyCodes,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> TokenRanks:
    """Ranks of all keys by estimated attention probability, mean over the queries; see `rank_codes`. Probabilities are
    told apart up to 2 ** `HEADROOM` / wanted, for totals are estimates, too small where few keys have most of it.

    On a GPU two kernels and few operations of torch, no synchronisation.

    Args:
        codes: as they are stored, of which none are copied; on a GPU with parts and channels of each that are powers
            of two.
        query: [H, R, D], all query heads of a group and all their tokens.
        totals: [H, R] float32, the log-sum-exps that probabilities are relative to.
        wanted: number of keys that will be chosen.

    Returns:
        ranks with the given log-sum-exps. Allocates a byte a key.
    """
    if query.is_cuda:
        from sparsekv.kernels.codes.joint_ranks_triton import rank_jointly_triton

        with torch.cuda.device_of(query):  # Triton launches on the current device, which may be another
            return rank_jointly_triton(query, totals, codes, wanted, softmax_scale, softcap)
    return rank_jointly_reference(query, totals, codes, wanted, softmax_scale, softcap)


def rank_jointly_reference(
    query: torch.Tensor,
    totals: torch.Tensor,
    codes: KeyCodes,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> TokenRanks:
    """`rank_jointly` in plain torch."""
    turned = (query.float() @ codes.turn.float()).unflatten(-1, (codes.books.shape[1], -1))
    products = torch.einsum("hrpd,hpcd->hrpc", turned, codes.books.float())
    names = codes.unpacked().transpose(1, 2)[:, None].expand(-1, query.shape[1], -1, -1)
    logits = softcapped(products.gather(-1, names).sum(2) * softmax_scale, softcap)
    return ranks_of(logits, totals, max(1, wanted >> HEADROOM))
